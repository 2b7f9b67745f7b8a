"""A target from a TensorRT-LLM checkpoint folder: config.json and rank0.safetensors, one rank.

Its names differ from Hugging Face's: q, k and v are one matrix `attention.qkv` (rows of q, then k,
then v), `mlp.fc` is the gate projection, `mlp.gate` the up projection, `mlp.proj` the down
projection. The folder has no tokenizer of its own: put tokenizer.json and its neighbours there, or
name the folder that has them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from dspark_trt.build.config import ConfigError, LayerDims, TargetDims, require
from dspark_trt.build.families import DEFAULT_THETA, FAMILIES, Family, target_dims
from dspark_trt.build.json_file import Fields, read_object
from dspark_trt.build.safetensors_file import SafetensorsFile, main_dtype, require_floats
from dspark_trt.build.source import (
    CheckpointError,
    TargetCheckpoint,
    check_finite,
    existing_file,
    naming,
)
from dspark_trt.build.tokenizer_files import (
    check_vocabulary,
    eos_ids,
    read_generation_config,
    read_tokenizer,
)

ARCHITECTURES = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "MistralForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "Qwen3ForCausalLM",
}
QWEN_TYPES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # of QWenForCausalLM
OUTER = {
    "transformer.vocab_embedding.weight": "embed_tokens.weight",
    "transformer.ln_f.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
INNER = {
    "attention.dense": "self_attn.o_proj",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
    "mlp.fc": "mlp.gate_proj",
    "mlp.gate": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
}
FUSED = "attention.qkv"
# Fields that change the computation, and the one value we compute with.
FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "rotary_pct": (1.0, 1),
    "residual_mlp": (False,),
    "fc_after_embed": (False,),
    "use_logn_attn": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "embedding_multiplier": (1.0, 1),
    "attention_multiplier": (1.0, 1),
    "residual_multiplier": (1.0, 1),
    "output_multiplier_scale": (1.0, 1),
}
# Their names in config.json of Hugging Face are the same.
SAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "hidden_act",
    "sliding_window",
)


class TrtllmWeights:
    """The tensors of rank0.safetensors under canonical names: a `WeightSource`."""

    def __init__(self, file: SafetensorsFile, layer: LayerDims) -> None:
        self.path = file.path
        self._file = file
        q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        bounds = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        self._where: dict[str, tuple[str, slice]] = {}
        for stored in file.slices:
            match = re.fullmatch(r"transformer\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", stored)
            if match and match[2] == FUSED:
                self._require_rows(stored, q + 2 * kv)
                for name, (low, high) in bounds.items():
                    canonical = f"layers.{int(match[1])}.self_attn.{name}.{match[3]}"
                    self._add(canonical, stored, slice(low, high))
            elif match and match[2] in INNER:
                canonical = f"layers.{int(match[1])}.{INNER[match[2]]}.{match[3]}"
                self._add(canonical, stored, slice(None))
            else:
                self._add(OUTER.get(stored, stored), stored, slice(None))

    def _add(self, name: str, stored: str, rows: slice) -> None:
        if name in self._where:
            raise CheckpointError(
                f"{self.path}: tensors {self._where[name][0]} and {stored} are both {name}"
            )
        self._where[name] = (stored, rows)

    def _require_rows(self, stored: str, rows: int) -> None:
        shape = self._file.slices[stored].shape
        if not shape or shape[0] != rows:
            raise CheckpointError(
                f"{self.path}: tensor {stored} has shape {list(shape)}, the config calls for "
                f"{rows} rows (q, k and v)"
            )

    def names(self) -> list[str]:
        """Every tensor, in order of name."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`."""
        stored, rows = self._where[name]
        shape = self._file.slices[stored].shape
        return (len(range(*rows.indices(shape[0]))), *shape[1:]) if shape else shape

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor, checked to be finite; a new array."""
        stored, rows = self._where[name]
        values = np.array(self._file.raw(stored)[rows], dtype=np.float32)
        check_finite(self.path, f"{stored} ({name})", values)
        return values


def open_trtllm(folder: Path, tokenizer_folder: Path | None = None) -> TargetCheckpoint:
    """Open a TensorRT-LLM checkpoint folder; reads headers and configs, no weights."""
    path = folder / "config.json"
    config = Fields(str(path), read_object(path))
    texts = tokenizer_folder or folder
    generation = read_generation_config(texts)
    with naming(path):
        family = _family(config)
        _require_one_plain_rank(config)
        dims = _dims(config, family)
    ends = eos_ids(
        Fields(str(texts / "generation_config.json"), generation),
        config,
        vocab_size=dims.vocab_size,
    )
    tokenizer = read_tokenizer(texts, ends)
    check_vocabulary(tokenizer, dims.vocab_size, where=texts)
    all_ends = tokenizer.config["eos_token_ids"]
    assert isinstance(all_ends, list)
    dims = replace(dims, eos_token_ids=tuple(all_ends))
    weights = existing_file(folder / "rank0.safetensors", needed_for="the weights of rank 0")
    file = SafetensorsFile(weights)
    require_floats([file])
    return TargetCheckpoint(
        source_format="tensorrt-llm",
        dims=dims,
        weights=TrtllmWeights(file, dims.layer),
        weight_dtype=main_dtype([file]),
        tokenizer=tokenizer,
        generation_config=generation,
        files=(path, file.path),
    )


def _family(config: Fields) -> Family:
    name = config.text("architecture")
    if name == "QWenForCausalLM":
        kind = config.text("qwen_type")
        if kind not in QWEN_TYPES:
            raise config.fail("qwen_type", f"one of {', '.join(QWEN_TYPES)}")
        return FAMILIES[QWEN_TYPES[kind]]
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{config.where}: architecture {name!r} is not supported; supported are "
            f"{', '.join((*ARCHITECTURES, 'QWenForCausalLM'))}"
        )
    return FAMILIES[ARCHITECTURES[name]]


def _require_one_plain_rank(config: Fields) -> None:
    """Refuse several ranks, quantised weights and mixtures of experts."""
    mapping = config.section("mapping")
    for name in mapping.values:
        if name.endswith("_size") and name != "gpus_per_node" and mapping.has(name):
            require(
                mapping.get(name) == 1,
                f"{mapping.where}: {name} must be 1, got {mapping.get(name)!r}: convert the "
                "checkpoint again for one rank (--tp_size 1 --pp_size 1)",
            )
    quantization = config.section("quantization")
    for name in ("quant_algo", "kv_cache_quant_algo"):
        require(
            not quantization.has(name),
            f"{quantization.where}: {name} must be null, got {quantization.get(name)!r}: convert "
            "the checkpoint again without quantisation (dspark build --quantize makes it small)",
        )
    require(
        not config.section("moe").get("num_experts"),
        f"{config.where}: moe.num_experts must be 0: mixtures of experts are not supported",
    )


def _dims(config: Fields, family: Family) -> TargetDims:
    """Dimensions, by way of the fields of Hugging Face's config.json."""
    for name, allowed in FIXED.items():
        config.expect(name, *allowed)
    position = config.text("position_embedding_type", "rope_gpt_neox")
    require(
        position.rsplit(".", 1)[-1] == "rope_gpt_neox",
        f"{config.where}: position_embedding_type must be 'rope_gpt_neox', got {position!r}",
    )
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_size", max(hidden // heads, 1))
    config.expect("rotary_embedding_dim", head_dim)
    values: dict[str, object] = {name: config.get(name) for name in SAME}
    values |= {
        "head_dim": head_dim,
        "rms_norm_eps": config.number("norm_epsilon", 1e-5),
        "rope_theta": config.number("rotary_base", DEFAULT_THETA),
        "rope_scaling": config.get("rotary_scaling"),
        "max_position_embeddings": config.integer("max_position_embeddings", high=1 << 31),
        "tie_word_embeddings": config.boolean("tie_word_embeddings", False)
        or config.boolean("share_embedding_table", False),
    }
    dims = target_dims(Fields(config.where, values), family)
    qwen = family.name.startswith("qwen")
    attention_bias = config.boolean("attn_bias", family.qkv_bias)
    layer = replace(
        dims.layer,
        qkv_bias=attention_bias,
        o_bias=attention_bias and not qwen,  # Qwen's dense has none, whatever attn_bias says
        mlp_bias=config.boolean("mlp_bias", False),
    )
    return replace(dims, layer=layer)
