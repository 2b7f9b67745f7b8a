"""Each supported decoder of tokenizer.json, token by token, against the tokenizers library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dspark_trt.runtime.pieces import PieceError, decoder_states

SPACE = "\u2581"
WORDS = [
    *(
        "a",
        "b",
        SPACE,
        f"{SPACE}a",
        f"{SPACE}{SPACE}",
        f"a{SPACE}b",
        " ",
        "  a",
        "\u0120x",
        "\u00e2",
    ),
    *("<0xE2>", "<0x82>", "<0xAC>", "<0x41>", "<0x+A>", "<0xZZ>", "<0xe2>", "<0x1>", "\u4f60"),
]


def replace() -> Any:
    return decoders.Replace(SPACE, " ")


KINDS: dict[str, Any] = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "byte level alone in a sequence": decoders.Sequence([decoders.ByteLevel()]),
    "llama 2": decoders.Sequence(
        [replace(), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "two spaces stripped": decoders.Sequence(
        [replace(), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "gemma": decoders.Sequence([replace(), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace with bytes": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
}


def decoder_json(decoder: Any) -> tuple[Tokenizer, dict[str, Any] | None]:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer, json.loads(tokenizer.to_str())["decoder"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=10))
def test_tokens_decode_one_by_one_as_all_at_once(kind: str, ids: list[int]) -> None:
    tokenizer, description = decoder_json(KINDS[kind])
    state = decoder_states(description)()
    texts = [text for i in ids for text in state.push(WORDS[i])]
    assert len(texts) <= len(ids)
    assert "".join(texts + state.flush()) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "culprit"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]), "ByteFallback"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: Any, culprit: str) -> None:
    with pytest.raises(PieceError, match=f"{culprit} is not supported"):
        decoder_states(decoder_json(decoder)[1])


def test_a_replacement_by_pattern_is_refused() -> None:
    steps = [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}]
    with pytest.raises(PieceError, match="Replace has no pattern of type String"):
        decoder_states({"type": "Sequence", "decoders": steps})
