"""Loading a tokenizer from an engine directory, ids, and clear errors for broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import build_tokenizer
from tokenizers import decoders

from dspark_trt.runtime.sampling_params import RequestError
from dspark_trt.runtime.tokenizer import Tokenizer, TokenizerError

CONFIG: dict[str, Any] = {
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": None,
    "unk_token": None,
    "eos_token_ids": [1],
    "add_bos": False,
    "chat_template": None,
    "vocab_size": 320,
}


def engine(folder: Path, *, json_text: str | None = None, **config: Any) -> Path:
    """An engine directory that holds a tiny tokenizer and nothing else."""
    (folder / "tokenizer").mkdir()
    text = build_tokenizer(320).to_str() if json_text is None else json_text
    (folder / "tokenizer" / "tokenizer.json").write_text(text, encoding="utf-8")
    values = {k: v for k, v in {**CONFIG, **config}.items() if v is not ...}
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return folder


def test_smollm2_encodes_and_decodes(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("hello world")
    assert ids == [28120, 905]
    assert smollm2.decode(ids) == "hello world"
    assert smollm2.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert smollm2.decode([1, 4093, 2]) == "user"
    assert smollm2.decode([1, 4093, 2], skip_special_tokens=False) == "<|im_start|>user<|im_end|>"
    assert smollm2.vocab_size == 49152
    assert 2 in smollm2.eos_token_ids


def test_bos_comes_first_where_the_model_wants_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(engine(tmp_path, add_bos=True))
    plain = tokenizer.encode("one", add_special_tokens=False)
    assert tokenizer.encode("one") == [0, *plain]
    assert tokenizer.encode("") == [0]


def test_bos_is_not_added_twice(tmp_path: Path) -> None:
    text = build_tokenizer(320, add_bos=True).to_str()
    tokenizer = Tokenizer.load(engine(tmp_path, json_text=text, add_bos=True))
    ids = tokenizer.encode("one")
    assert ids[0] == 0
    assert ids[1:] == tokenizer.encode("one", add_special_tokens=False)


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    raw = build_tokenizer(320)
    raw.enable_truncation(3)
    raw.enable_padding(length=64)
    tokenizer = Tokenizer.load(engine(tmp_path, json_text=raw.to_str()))
    text = "A small model can still learn."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_is_no_unicode_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt must be valid Unicode, got a lone surrogate"):
        smollm2.encode("a\ud800b")
    not_text: Any = b"abc"
    with pytest.raises(RequestError, match="prompt must be a string"):
        smollm2.encode(not_text)


class PanicException(BaseException):
    """As the library's: no Exception."""


@pytest.mark.parametrize("error", [PanicException("called `unwrap()`"), ValueError("bad regex")])
def test_a_panic_of_the_library_is_the_requests_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    tokenizer = Tokenizer.load(engine(tmp_path))

    class Broken:
        def encode(self, *_: object, **__: object) -> None:
            raise error

    monkeypatch.setattr(tokenizer, "_tokenizer", Broken())
    with pytest.raises(RequestError, match=f"prompt cannot be encoded .*{str(error)[:6]}"):
        tokenizer.encode("x")
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")


def test_too_long_a_text_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(engine(tmp_path))
    with pytest.raises(RequestError, match="prompt must be at most 16777216 characters, got 1677"):
        tokenizer.encode("x" * (1 << 24) + "y")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_bos": ...}, "lacks add_bos"),
        ({"model_max_length": 5}, "has unknown model_max_length"),
        ({"add_bos": 1}, "add_bos must be bool, got 1"),
        ({"vocab_size": "many"}, "vocab_size must be int, got 'many'"),
        ({"vocab_size": True}, "vocab_size must be int, got True"),
        ({"eos_token_ids": 1}, "eos_token_ids must be list, got 1"),
        ({"eos_token_ids": ["x"]}, "eos_token_ids must be int, got 'x'"),
        ({"eos_token_ids": [320]}, r"eos_token_ids must be in \[0, 320\), got 320"),
        ({"chat_template": 3}, "chat_template must be str or NoneType, got 3"),
        ({"add_bos": True, "bos_token": "<none>"}, "bos_token is not in the vocabulary"),
        ({"json_text": "{}"}, "not a tokenizers file"),
        ({"json_text": "no json"}, "not a tokenizers file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_broken_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(engine(tmp_path, **changes))


def test_absent_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: cannot be read"):
        Tokenizer.load(tmp_path)
    folder = engine(tmp_path)
    (folder / "tokenizer" / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: cannot be read"):
        Tokenizer.load(folder)
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match="not JSON"):
        Tokenizer.load(folder)
    (folder / "tokenizer" / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(TokenizerError, match="expected a JSON object"):
        Tokenizer.load(folder)


def test_an_unsupported_decoder_is_refused_at_load(tmp_path: Path) -> None:
    raw = build_tokenizer(320)
    raw.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece is not supported"):
        Tokenizer.load(engine(tmp_path, json_text=raw.to_str()))
