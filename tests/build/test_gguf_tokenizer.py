"""Tokenizers from GGUF metadata: ids equal to those that Transformers gives for the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_factory import TEXTS, byte_level_metadata, sentencepiece_metadata, write_gguf
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from dspark_trt.build.gguf_file import GgufFile
from dspark_trt.build.gguf_tokenizer import merges_from_scores, tokenizer_from_metadata
from dspark_trt.build.source import CheckpointError, TokenizerFiles

CONFIG = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
}


def gguf(
    tmp_path: Path, tokenizer: dict[str, Any], architecture: str = "llama", **extra: Any
) -> Path:
    extra = {"general.name": "tiny"} | {k.replace("__", "."): v for k, v in extra.items()}
    return write_gguf(
        tmp_path / "t.gguf",
        architecture,
        config=CONFIG | {"vocab_size": max(len(tokenizer.get("tokens", [])), 1)},
        tensors={},
        tokenizer=tokenizer,
        extra=extra,
    )


def read(path: Path) -> TokenizerFiles:
    return tokenizer_from_metadata(GgufFile(path))


def assert_same_ids(path: Path, loader: Any = AutoTokenizer) -> None:
    """Ids, text of the ids and the leading BOS are Transformers' for every text."""
    files = read(path)
    ours = Tokenizer.from_str(files.tokenizer_json)
    theirs = loader.from_pretrained(path.parent, gguf_file=path.name)
    bos = [ours.token_to_id(files.config["bos_token"])] if files.config["add_bos"] else []
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        assert bos + ids == theirs(text).input_ids, text
        for skip in (False, True):
            decoded = theirs.backend_tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert files.config[name] == getattr(theirs, name)
    assert files.config["vocab_size"] == len(theirs)
    assert files.config["chat_template"] == theirs.chat_template


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2", "default"])
def test_byte_level_ids(tmp_path: Path, pre: str, architecture: str) -> None:
    assert_same_ids(gguf(tmp_path, byte_level_metadata(pre), architecture))


@pytest.mark.parametrize("add_bos", [True, False])
def test_byte_level_with_bos(tmp_path: Path, add_bos: bool) -> None:
    tokenizer = byte_level_metadata("llama-bpe") | {"add_bos_token": add_bos}
    path = gguf(tmp_path, tokenizer, tokenizer__chat_template="{{ messages }}")
    assert_same_ids(path)
    assert read(path).config["add_bos"] is add_bos
    assert read(path).config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("add_bos", [None, False])
def test_sentencepiece_ids(tmp_path: Path, add_bos: bool | None) -> None:
    tokenizer = sentencepiece_metadata()
    if add_bos is not None:
        tokenizer["add_bos_token"] = add_bos
    path = gguf(tmp_path, tokenizer)
    assert_same_ids(path)
    assert read(path).config["add_bos"] is (add_bos is None)


def test_sentencepiece_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(read(gguf(tmp_path, sentencepiece_metadata())).tokenizer_json)
    tokens = tokenizer.encode("\u6771", add_special_tokens=False).tokens
    assert tokens[-3:] == ["<0xE6>", "<0x9D>", "<0xB1>"]
    assert tokenizer.decode(tokenizer.encode("a \u6771").ids) == "a \u6771"


def test_smollm2_ids_and_template(smollm2_gguf: Path) -> None:
    # The class that AutoTokenizer picks for this file, after reading all of it twice.
    assert_same_ids(smollm2_gguf, PreTrainedTokenizerFast)
    config = read(smollm2_gguf).config
    assert config["eos_token"] == "<|im_end|>"
    assert config["eos_token_ids"] == [2]
    assert config["add_bos"] is False


def test_merges_follow_from_scores_as_in_transformers() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        words = {"".join(rng.choice(list("abc"), size=rng.integers(1, 6))) for _ in range(150)}
        vocabulary = {word: i for i, word in enumerate(sorted(words))}
        scores = rng.integers(-4, 2, size=len(vocabulary)).astype(np.float32)
        expected = generate_merges(vocabulary, dict(zip(vocabulary, scores.tolist())))
        assert merges_from_scores(vocabulary, scores) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, "'tekken' is not supported; supported are default, gpt-2, smollm"),
        ({"model": "t5"}, "'t5' is not supported; supported are gpt2 and llama"),
        ({"tokens": "none"}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"merges": ["nospace"]}, "holds 'nospace', expected two tokens and a space"),
        ({"merges": ["zz yy"]}, "the tokenizer is inconsistent"),
        ({"token_type": [1, 1]}, "token_type must hold 420 finite numbers"),
        ({"bos_token_id": 420}, r"bos_token_id must be an id in \[0, 420\), got 420"),
        ({"eos_token_id": -1.5}, "eos_token_id must be an id"),
        ({"tokens": ["a"] * 420}, "token 'a' is in tokenizer.ggml.tokens twice"),
        ({"tokens": ["x" * 5000, "y"]}, "has 5000 characters"),
    ],
)
def test_faults_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = gguf(tmp_path, byte_level_metadata("gpt-2") | changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert "t.gguf" in str(caught.value)


def test_absent_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer .*give --tokenizer DIR"):
        read(gguf(tmp_path, {}))


@pytest.mark.parametrize("scores", [[float("nan")] * 462, [0.0] * 3])
def test_bad_scores_are_named(tmp_path: Path, scores: list[float]) -> None:
    tokenizer = sentencepiece_metadata()
    assert len(tokenizer["tokens"]) == 462
    with pytest.raises(CheckpointError, match="scores must hold 462 finite numbers"):
        read(gguf(tmp_path, tokenizer | {"scores": scores}))
