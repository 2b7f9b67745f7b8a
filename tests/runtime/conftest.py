"""Tokenizers of several kinds, the real one of SmolLM2 among them; an engine that drafts well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RawTokenizer

from dspark_trt.build.gguf_file import GgufFile
from dspark_trt.build.gguf_tokenizer import tokenizer_from_metadata
from dspark_trt.runtime.budget import Static
from dspark_trt.runtime.llm import LLM
from dspark_trt.runtime.tokenizer import Tokenizer

PLAIN_CONFIG: dict[str, object] = {
    "bos_token": None,
    "eos_token": None,
    "pad_token": None,
    "unk_token": None,
    "eos_token_ids": [],
    "add_bos": False,
    "chat_template": None,
    "vocab_size": 1,
}


def write_tokenizer(folder: Path, tokenizer_json: str, config: dict[str, object]) -> Path:
    """Lay the two files out as in an engine directory; `folder` comes back."""
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    text = json.dumps({**PLAIN_CONFIG, **config})
    (folder / "tokenizer" / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SmolLM2's byte-level BPE, 49152 tokens, with its chat template."""
    files = tokenizer_from_metadata(GgufFile(smollm2_gguf))
    folder = tmp_path_factory.mktemp("smollm2")
    return Tokenizer.load(write_tokenizer(folder, files.tokenizer_json, files.config))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama 2's shape: <unk> <s> </s>, 256 byte tokens, then words with a leading space mark."""
    words = [
        "\u2581",
        "\u2581the",
        "\u2581a",
        "he",
        "llo",
        "lo",
        "\u2581\u2581",
        "a",
        "e",
        "h",
        "l",
    ]
    words += ["o", "t", "\n", "\u00e9", "\u2581\u4f60"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    raw = RawTokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")]
    )
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "eos_token_ids": [2],
        "add_bos": True,
        "vocab_size": len(tokens),
    }
    folder = tmp_path_factory.mktemp("sentencepiece")
    return Tokenizer.load(write_tokenizer(folder, raw.to_str(), config))


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Seven tokens that spell a, b and a space in several ways, and <end> (id 7), special."""
    pieces = ["a", "b", "ab", "ba", "aab", "\u0120", "b\u0120a"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<end>"])}
    raw = RawTokenizer(models.WordLevel(vocab=vocabulary, unk_token="a"))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    config: dict[str, object] = {"eos_token": "<end>", "eos_token_ids": [7], "vocab_size": 8}
    folder = tmp_path_factory.mktemp("letters")
    return Tokenizer.load(write_tokenizer(folder, raw.to_str(), config))


@pytest.fixture(scope="session")
def pair_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with drafts that are accepted often: V = 128, G = 4, 4 slots, 128 tokens."""
    from markov_pair import markov_pair  # torch is imported where an engine is needed, only
    from tiny_engine import tiny_engine

    folder = tmp_path_factory.mktemp("pair")
    target, drafter = markov_pair(folder, 128, noise=0.1)
    return tiny_engine(folder / "engine", target, drafter)


@pytest.fixture(scope="module")
def shared_llm(pair_engine: Path) -> LLM:
    return LLM(pair_engine, threads=1)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The pair's engine, found and left idle with all its pages free."""
    shared_llm.engine.metrics.reset()
    yield shared_llm
    assert shared_llm.engine.batcher.idle
    assert shared_llm.pool.num_free == shared_llm.pool.capacity
    shared_llm.engine.policy = Static()
