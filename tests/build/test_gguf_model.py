"""Targets from GGUF files: weights and dims against Transformers, and what is refused."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_edits import state_of
from factories import load_target, tiny_target
from gguf.quants import dequantize
from gguf_factory import byte_level_metadata, gguf_target, sentencepiece_metadata
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from dspark_trt.build.checkpoint import CheckpointError, open_target
from dspark_trt.build.config import ConfigError
from dspark_trt.build.gguf_file import GgufFile
from dspark_trt.build.gguf_model import half_split_rows

VOCAB = 420
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie": True}),
    "llama untied, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie": True}),
}


def written(
    tmp_path: Path, family: str, *, gguf: dict[str, Any] | None = None, **options: Any
) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]]:
    """A tiny target as a GGUF file, its weights and its config.json."""
    folder = tiny_target(tmp_path, family, **({"vocab": VOCAB} | options))
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    weights = state_of(load_target(folder))
    architecture = "llama" if family in ("llama", "llama3", "mistral") else family
    path = gguf_target(tmp_path / "m.gguf", architecture, config, weights, **(gguf or {}))
    return path, weights, config


def transformers_weights(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """The weights and config that Transformers reads from a GGUF file."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)
    return {k.removeprefix("model."): v.numpy() for k, v in tensors["tensors"].items()}, config


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_the_trained_ones(tmp_path: Path, model: str) -> None:
    family, options = MODELS[model]
    path, weights, config = written(tmp_path, family, **options)
    ckpt = open_target(path)
    assert ckpt.weights.names() == sorted(weights)
    for name, values in weights.items():
        assert ckpt.weights.shape(name) == values.shape
        np.testing.assert_array_equal(ckpt.weights.tensor(name), values, err_msg=name)
    layer = ckpt.dims.layer
    assert (ckpt.source_format, ckpt.dims.family, ckpt.weight_dtype) == ("gguf", family, "F32")
    assert ckpt.dims.tie_word_embeddings is options.get("tie", False)
    assert layer.qk_norm is (family == "qwen3")
    assert layer.qkv_bias is (family == "qwen2" or "attention_bias" in options)
    assert layer.o_bias is layer.mlp_bias is ("mlp_bias" in options)
    assert (layer.head_dim, ckpt.dims.max_position) == (config["head_dim"], 512)
    assert ckpt.dims.vocab_size == VOCAB


def test_unpermuting_agrees_with_transformers(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, "llama")
    ckpt = open_target(path)
    expected, _ = transformers_weights(path)
    for name in ckpt.weights.names():
        np.testing.assert_array_equal(ckpt.weights.tensor(name), expected[name], err_msg=name)


def test_half_split_rows_by_hand() -> None:
    rows = np.array([[0], [10], [1], [11], [2], [12], [3], [13]])  # two heads of D = 4
    assert half_split_rows(rows, 2).ravel().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_smollm2_dims_and_weights(smollm2_gguf: Path) -> None:
    """Some tensors against Transformers' un-permuting; the whole model is a slow test."""
    ckpt = open_target(smollm2_gguf)
    dims = ckpt.dims
    assert ckpt.weight_dtype == "Q4_1"
    assert dims.tie_word_embeddings
    assert (dims.num_layers, dims.vocab_size, dims.max_position) == (30, 49152, 8192)
    assert (dims.layer.num_heads, dims.layer.num_kv_heads, dims.layer.head_dim) == (9, 3, 64)
    assert dims.layer.rms_norm_eps == pytest.approx(1e-5)
    assert dims.layer.rope.theta == 100000.0
    assert dims.eos_token_ids == (2,)
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    stored = GgufFile(smollm2_gguf).tensors
    data = np.memmap(smollm2_gguf, np.uint8, "r")
    assert len(ckpt.weights.names()) == len(stored)
    for name, original in (
        ("embed_tokens.weight", "token_embd.weight"),
        ("layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight"),
        ("layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
        ("layers.11.mlp.down_proj.weight", "blk.11.ffn_down.weight"),
        ("layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
    ):
        tensor = stored[original]
        rows = data[tensor.offset : tensor.offset + tensor.size].reshape(*tensor.shape[:-1], -1)
        values = dequantize(rows, tensor.kind)
        expected = processor.process(values, original).weights
        np.testing.assert_array_equal(ckpt.weights.tensor(name), expected, err_msg=name)


@pytest.mark.slow
def test_all_of_smollm2_equals_transformers(smollm2_gguf: Path) -> None:
    ckpt = open_target(smollm2_gguf)
    expected, config = transformers_weights(smollm2_gguf)
    assert ckpt.dims.layer.rms_norm_eps == config.rms_norm_eps
    assert ckpt.weights.names() == sorted(expected)
    for name in ckpt.weights.names():
        np.testing.assert_array_equal(ckpt.weights.tensor(name), expected[name], err_msg=name)


def llama3_factors(theta: float, dim: int, factor: float, original: int = 8192) -> np.ndarray:
    """rope_freqs.weight as converters write it for Llama 3's scaling (low 1, high 4)."""
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_off_its_factors(tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(500000.0, 16, factor)
    path, _, _ = written(tmp_path, "llama3", gguf={"more_tensors": {"rope_freqs.weight": factors}})
    ckpt = open_target(path)
    assert ckpt.dims.layer.rope.llama3 == (factor, 1.0, 4.0, 8192)
    assert "rope_freqs.weight" not in ckpt.weights.names()


def test_other_frequency_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_factors(500000.0, 16, 8.0) * np.linspace(1, 1.2, 8, dtype=np.float32)
    path, _, _ = written(tmp_path, "llama3", gguf={"more_tensors": {"rope_freqs.weight": factors}})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        open_target(path)


def test_linear_scaling_and_sliding_window(tmp_path: Path) -> None:
    extra = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.5,
        "llama.attention.sliding_window": 16,
    }
    path, _, _ = written(tmp_path, "mistral", gguf={"extra": extra})
    dims = open_target(path).dims
    assert dims.layer.rope.linear_factor == 2.5
    assert (dims.family, dims.sliding_windows) == ("mistral", (16, 16))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "gemma2"}, "'gemma2' is not supported; supported are llama"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count \(8\) must be equal"),
        ({"llama.expert_count": 8}, "expert_count 8 is not supported"),
        ({"split.count": 3}, "split over 3 GGUF files: merge them"),
        ({"llama.block_count": 0}, "num_hidden_layers must be an integer in"),
        ({"llama.block_count": 3}, "tensors are missing: layers.2"),
        ({"llama.block_count": 1}, "tensors are unknown: layers.1"),
        ({"llama.attention.head_count": 0}, "head_count must be an integer >= 1, got 0"),
        ({"llama.attention.head_count": "four"}, "head_count must be an integer >= 1"),
        ({"llama.embedding_length": 4_000_000_000}, "hidden_size must be an integer in"),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta must be a number > 0"),
        ({"tokenizer.ggml.eos_token_id": VOCAB}, r"eos_token_id must be an id in \[0, 420\)"),
    ],
)
def test_metadata_faults_are_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    path, _, _ = written(tmp_path, "llama", gguf={"extra": extra})
    with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
        open_target(path)
    assert "m.gguf" in str(caught.value)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    stray = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path, _, _ = written(tmp_path, "llama", gguf={"more_tensors": stray})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_sinks\.weight is unknown"):
        open_target(path)


def test_all_end_tokens_count(tmp_path: Path) -> None:
    tokenizer = byte_level_metadata("llama-bpe", vocab=VOCAB) | {
        "eot_token_id": 7,
        "eom_token_id": 5,
    }
    path, _, _ = written(tmp_path, "llama", gguf={"tokenizer": tokenizer})
    ckpt = open_target(path)
    assert ckpt.dims.eos_token_ids == (2, 5, 7)
    assert ckpt.tokenizer.config["eos_token_ids"] == [2, 5, 7]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_no_mutation_escapes_as_another_exception(tmp_path: Path, kind: str) -> None:
    """Damage in metadata that parses: wrong types, ids, counts; always one of our errors."""
    tokenizer = byte_level_metadata("qwen2", vocab=462)
    if kind == "llama":
        tokenizer = sentencepiece_metadata()
    path, _, _ = written(tmp_path, "llama", gguf={"tokenizer": tokenizer}, vocab=462, layers=1)
    data, rng = path.read_bytes(), random.Random(0)
    metadata = data.find(b"blk.0")
    mutant, refused = tmp_path / "mutant.gguf", 0
    for i in range(400):
        changed = bytearray(data)
        for _ in range(1 + i % 3):
            at = rng.randrange(metadata - 8)
            if rng.random() < 0.5:
                value = rng.choice([0, 1, 2, 255, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 64) - 1])
                changed[at : at + 8] = struct.pack("<Q", value)
            else:
                changed[at] = rng.randrange(256)
        mutant.unlink(missing_ok=True)
        mutant.write_bytes(changed)
        try:
            open_target(mutant)
        except (CheckpointError, ConfigError) as error:
            assert "mutant.gguf" in str(error)
            refused += 1
    assert refused > 200


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_metadata("qwen2", vocab=VOCAB + 9)
    path, _, _ = written(tmp_path, "llama", gguf={"tokenizer": tokenizer})
    with pytest.raises(CheckpointError, match="ids up to 429 - 1, the model's vocab_size is 420"):
        open_target(path)


def test_tokenizer_folder_wins(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, "llama", gguf={"tokenizer": {"model": "bert"}})
    with pytest.raises(CheckpointError, match="'bert' is not supported.*--tokenizer DIR"):
        open_target(path)
    folder = next(p for p in tmp_path.iterdir() if p.is_dir())
    assert open_target(path, folder).tokenizer.config["bos_token"] == "<|bos|>"
