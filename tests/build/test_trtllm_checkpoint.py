"""Targets from TensorRT-LLM checkpoint folders, written here as its converters write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_edits import copied, edit_json, edit_tensors, state_of
from factories import load_target, tiny_target
from safetensors.torch import save_file

from dspark_trt.build.checkpoint import CheckpointError, open_target
from dspark_trt.build.config import ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama3": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
INNER = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.q_layernorm",
    "self_attn.k_norm": "attention.k_layernorm",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_layernorm",
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def converted(weights: dict[str, np.ndarray], *, clone_head: bool) -> dict[str, torch.Tensor]:
    """rank0.safetensors of a model with these canonical weights."""
    tensors = {
        "transformer.vocab_embedding.weight": weights["embed_tokens.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
    }
    if clone_head or "lm_head.weight" in weights:
        head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
        tensors["lm_head.weight"] = head.copy()
    for name, values in weights.items():
        if not name.startswith("layers."):
            continue
        _, layer, rest = name.split(".", 2)
        inner, leaf = rest.rsplit(".", 1)
        prefix = f"transformer.layers.{layer}"
        if inner == "self_attn.q_proj":
            parts = [weights[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            tensors[f"{prefix}.attention.qkv.{leaf}"] = np.concatenate(parts)
        elif inner in INNER:
            tensors[f"{prefix}.{INNER[inner]}.{leaf}"] = values
    return {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in tensors.items()}


def written(
    tmp_path: Path, family: str, *, clone_head: bool = False, **options: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny target as a TensorRT-LLM checkpoint with its tokenizer, and its weights."""
    source = tiny_target(tmp_path, family, **options)
    config = json.loads((source / "config.json").read_text())
    weights = state_of(load_target(source))
    scaling = dict(config["rope_parameters"])
    theta = scaling.pop("rope_theta")
    folder = tmp_path / "trtllm"
    folder.mkdir()
    values = {
        "architecture": ARCHITECTURES[family],
        "dtype": "float32",
        "logits_dtype": "float32",
        **{
            key: config[key]
            for key in (
                "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "vocab_size", "max_position_embeddings", "hidden_act",
                "tie_word_embeddings",
            )
        },
        "head_size": config.get("head_dim") or config["hidden_size"] // 4,
        "norm_epsilon": config["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": theta,
        "rotary_scaling": scaling if scaling["rope_type"] != "default" else None,
        "attn_bias": family == "qwen2" or options.get("attention_bias", False),
        "mlp_bias": options.get("mlp_bias", False),
        "moe": {"num_experts": 0, "top_k": 0},
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "gpus_per_node": 8},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    save_file(converted(weights, clone_head=clone_head), folder / "rank0.safetensors")
    for name in TOKENIZER:
        shutil.copy(source / name, folder / name)
    return folder, weights


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"tie": True, "clone_head": True},
    "mistral": {},
    "qwen2": {"tie": True},
    "qwen3": {},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("trt"), "llama")[0]


@pytest.mark.parametrize("family", MODELS)
def test_weights_and_dims_are_the_models(tmp_path: Path, family: str) -> None:
    folder, weights = written(tmp_path, family, **MODELS[family])
    ckpt = open_target(folder)
    names = [n for n in ckpt.weights.names() if n != "lm_head.weight" or n in weights]
    assert names == sorted(weights)
    for name, values in weights.items():
        assert ckpt.weights.shape(name) == values.shape
        np.testing.assert_array_equal(ckpt.weights.tensor(name), values, err_msg=name)
    source = next(p for p in tmp_path.iterdir() if p.is_dir() and p != folder)
    twin = open_target(source).dims
    if family == "mistral":  # TensorRT-LLM's config has no window: it is a runtime option there
        assert ckpt.dims.sliding_windows == (0, 0)
    else:
        assert ckpt.dims == twin
    assert (ckpt.source_format, ckpt.dims.layer) == ("tensorrt-llm", twin.layer)
    assert ckpt.tokenizer.config["eos_token_ids"] == [1]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_by_its_type(tmp_path: Path, kind: str) -> None:
    folder, _ = written(tmp_path, kind)
    edit_json(folder / "config.json", architecture="QWenForCausalLM", qwen_type=kind)
    assert open_target(folder).dims.family == kind


def test_tokenizer_from_another_folder(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in TOKENIZER:
        shutil.move(folder / name, texts / name)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*--tokenizer DIR"):
        open_target(folder)
    assert open_target(folder, texts).tokenizer.config["bos_token"] == "<|bos|>"
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_target(folder, tmp_path / "nowhere")


def test_untied_model_without_head_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    edit_tensors(folder / "rank0.safetensors", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
        open_target(folder)
    edit_json(folder / "config.json", share_embedding_table=True)
    assert open_target(folder).dims.tie_word_embeddings


def test_missing_rank_file_is_named(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    (folder / "rank0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors is missing"):
        open_target(folder)


def test_fused_matrix_of_another_height_is_named(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    name = "transformer.layers.1.attention.qkv.weight"
    edit_tensors(folder / "rank0.safetensors", lambda t: t.update({name: torch.ones(100, 64)}))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[100, 64\].*128 rows"):
        open_target(folder)


def test_nan_is_named_as_the_file_names_it(llama: Path, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    name = "transformer.layers.0.attention.qkv.weight"
    edit_tensors(folder / "rank0.safetensors", lambda t: t[name][70, 1].fill_(float("inf")))
    weights = open_target(folder).weights
    weights.tensor("layers.0.self_attn.q_proj.weight")
    with pytest.raises(CheckpointError, match=rf"{name} \(layers\.0\.self_attn\.k_proj"):
        weights.tensor("layers.0.self_attn.k_proj.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "GPTForCausalLM"}, "'GPTForCausalLM' is not supported.*QWenForCausalLM"),
        ({"architecture": "QWenForCausalLM"}, "qwen_type is missing"),
        ({"architecture": "QWenForCausalLM", "qwen_type": "qwen"}, "qwen_type must be one of"),
        ({"mapping": {"world_size": 2, "tp_size": 2}}, "world_size must be 1, got 2"),
        ({"mapping": {"world_size": 1, "pp_size": 4}}, "pp_size must be 1, got 4"),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, "quant_algo must be null, got 'W4A16_AWQ'"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo must be null"),
        ({"moe": {"num_experts": 8}}, "num_experts must be 0"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type must be"),
        ({"rotary_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic' is not"),
        ({"rotary_pct": 0.5}, "rotary_pct must be 1.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier must be 1.0"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ],
)
def test_config_faults_are_named(
    llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = copied(llama, tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        open_target(folder)
    assert "config.json" in str(caught.value)
