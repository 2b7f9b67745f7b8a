"""Targets from Hugging Face folders: dims and weights against Transformers' own classes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_edits import copied, edit_json, edit_tensors, state_of
from factories import FAMILIES, load_target, tiny_target

from dspark_trt.build.checkpoint import CheckpointError, open_target
from dspark_trt.build.config import ConfigError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("hf"), "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("hf"), "llama", shard_size="64KB")


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, old config": {"tie": True, "legacy_config": True},
    "sharded bfloat16": {"shard_size": "64KB", "dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_transformers(tmp_path: Path, family: str, variant: str) -> None:
    options = VARIANTS[variant]
    folder = tiny_target(tmp_path, family, **options)
    ckpt = open_target(folder)
    expected = state_of(load_target(folder))
    assert ckpt.source_format == "huggingface"
    assert ckpt.weights.names() == sorted(expected)
    for name, values in expected.items():
        read = ckpt.weights.tensor(name)
        assert read.dtype == np.float32
        assert ckpt.weights.shape(name) == read.shape
        np.testing.assert_array_equal(read, values, err_msg=name)
    assert ckpt.weight_dtype == options.get("dtype", "float32")
    assert ckpt.dims.tie_word_embeddings is options.get("tie", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_dims_follow_the_config(tmp_path: Path, family: str) -> None:
    dims = open_target(tiny_target(tmp_path, family)).dims
    assert dims.family == family.removesuffix("3") if family == "llama3" else family
    assert dims.layer.qk_norm is (family == "qwen3")
    assert dims.layer.qkv_bias is (family == "qwen2")
    assert dims.layer.o_bias is dims.layer.mlp_bias is False
    assert dims.layer.head_dim == (24 if family == "qwen3" else 16)
    assert dims.sliding_windows == ((16, 16) if family == "mistral" else (0, 0))
    llama3 = (4.0, 1.0, 4.0, 64) if family == "llama3" else None
    assert dims.layer.rope.llama3 == llama3
    assert (dims.num_layers, dims.vocab_size, dims.max_position) == (2, 256, 512)


def test_biases_where_the_config_has_them(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    ckpt = open_target(folder)
    assert ckpt.dims.layer.qkv_bias and ckpt.dims.layer.o_bias and ckpt.dims.layer.mlp_bias
    expected = state_of(load_target(folder))
    for name in ("layers.1.self_attn.o_proj.bias", "layers.0.mlp.down_proj.bias"):
        np.testing.assert_array_equal(ckpt.weights.tensor(name), expected[name])


def test_end_tokens_are_those_of_generation_config_and_tokenizer(
    llama: Path, tmp_path: Path
) -> None:
    folder = copied(llama, tmp_path)
    edit_json(folder / "generation_config.json", eos_token_id=[3, 9])
    ckpt = open_target(folder)
    assert ckpt.dims.eos_token_ids == (1, 3, 9)
    assert ckpt.tokenizer.config["eos_token_ids"] == [1, 3, 9]
    assert ckpt.generation_config["eos_token_id"] == [3, 9]
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=5)
    assert open_target(folder).dims.eos_token_ids == (1, 5)


def test_untied_model_without_head_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    edit_tensors(folder / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
        open_target(folder)


def test_tied_model_may_repeat_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_target(tmp_path, "llama", tie=True)
    shard = folder / "model.safetensors"

    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(shard, repeat)
    with caplog.at_level(logging.WARNING):
        assert open_target(folder).dims.tie_word_embeddings
    assert "lm_head.weight repeats" in caplog.text

    edit_tensors(shard, lambda t: t["lm_head.weight"][3].add_(1.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from embed_tokens"):
        open_target(folder)


def test_absent_tie_key_means_untied(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=...)
    assert open_target(folder).dims.tie_word_embeddings is False


def test_swapped_names_do_not_go_unseen(llama: Path, tmp_path: Path) -> None:
    """Two tensors of one shape under each other's names: the mapping must not be by order."""
    folder = copied(llama, tmp_path)
    k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[k], tensors[v] = tensors[v], tensors[k]

    edit_tensors(folder / "model.safetensors", swap)
    before, after = open_target(llama).weights, open_target(folder).weights
    name = k.removeprefix("model.")
    assert not np.array_equal(before.tensor(name), after.tensor(name))


def test_nan_is_named(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder / "model.safetensors", lambda t: t[name][2, 5].fill_(float("nan")))
    ckpt = open_target(folder)  # opening reads no weights
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.*\[2, 5\]"):
        ckpt.weights.tensor("layers.1.mlp.up_proj.weight")


FAULTS = {
    "layers.1.input_layernorm.weight is missing": lambda t: t.pop(
        "model.layers.1.input_layernorm.weight"
    ),
    "tensor extra.weight is unknown": lambda t: t.update({"model.extra.weight": torch.ones(2)}),
    r"layers.0.mlp.up_proj.weight has shape \[1, 64\], the config calls for \[96, 64\]": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(1, 64)})
    ),
    "model.norm.weight has dtype I8, expected one of F32, F16, BF16": lambda t: t.update(
        {"model.norm.weight": torch.ones(64, dtype=torch.int8)}
    ),
    "model.norm.weight has dtype 'F64'": lambda t: t.update(
        {"model.norm.weight": torch.ones(64, dtype=torch.float64)}
    ),
    "model.norm.weight and norm.weight are both norm.weight": lambda t: t.update(
        {"norm.weight": torch.ones(64)}
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_tensor_faults_are_named(llama: Path, tmp_path: Path, message: str) -> None:
    folder = copied(llama, tmp_path)
    edit_tensors(folder / "model.safetensors", FAULTS[message])
    with pytest.raises(CheckpointError, match=message):
        open_target(folder)


def test_old_rotary_buffers_are_ignored(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit_tensors(folder / "model.safetensors", lambda t: t.update(buffer))
    assert open_target(folder).weights.names() == open_target(llama).weights.names()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported.*Qwen3For"),
        ({"architectures": ..., "model_type": "gemma"}, "model_type 'gemma' is not supported"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": -4}, r"hidden_size must be an integer in \[1, .*got -4"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"hidden_size": 10**12}, "hidden_size must be an integer"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0, got 0"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set"),
        ({"eos_token_id": "two"}, "eos_token_id must be a token id"),
    ],
)
def test_config_faults_are_named(
    llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = copied(llama, tmp_path)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        open_target(folder)
    assert "config.json" in str(caught.value)


def test_end_token_outside_the_vocabulary_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    edit_json(folder / "generation_config.json", eos_token_id=256)
    with pytest.raises((ConfigError, CheckpointError), match="eos_token_id.*256"):
        open_target(folder)


def test_missing_and_truncated_shards_are_named(sharded: Path, tmp_path: Path) -> None:
    folder = copied(sharded, tmp_path)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name}.*truncated"):
        open_target(folder)
    shard.write_bytes(data[:5])
    with pytest.raises(CheckpointError, match=rf"{shard.name}.*truncated"):
        open_target(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing"):
        open_target(folder)


def test_index_is_held_to_the_shards(sharded: Path, tmp_path: Path) -> None:
    folder = copied(sharded, tmp_path)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = list(weight_map.values())
    first = next(name for name, shard in weight_map.items() if shards.count(shard) > 1)
    for changed, message in (
        ({**weight_map, first: "../elsewhere.safetensors"}, "must name a file of this folder"),
        ({**weight_map, "model.ghost": weight_map[first]}, "lacks model.ghost"),
        ({k: v for k, v in weight_map.items() if k != first}, f"tensor {first} is not in"),
        ({}, "weight_map is missing or empty"),
    ):
        edit_json(index, weight_map=changed)
        with pytest.raises(CheckpointError, match=message):
            open_target(folder)


def test_pickled_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights can run code"):
        open_target(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_target(folder)


def test_links_are_followed(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).symlink_to(path)
    assert open_target(folder).content_hash == open_target(llama).content_hash


def test_content_hash_changes_with_one_weight(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    assert open_target(folder).content_hash == open_target(llama).content_hash
    edit_tensors(folder / "model.safetensors", lambda t: t["model.norm.weight"][0].add_(1e-3))
    assert open_target(folder).content_hash != open_target(llama).content_hash


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("tokenizer_config.json", "bos_token", 7),
        ("tokenizer_config.json", "chat_template", 7),
        ("generation_config.json", "eos_token_id", 256),
        ("generation_config.json", "eos_token_id", [1, -1]),
    ],
)
def test_a_fault_is_blamed_on_its_own_file(
    llama: Path, tmp_path: Path, file: str, field: str, value: object
) -> None:
    folder = copied(llama, tmp_path)
    edit_json(folder / file, **{field: value})
    with pytest.raises(ConfigError) as caught:
        open_target(folder)
    assert str(caught.value).startswith(f"{folder / file}: {field} must be")
