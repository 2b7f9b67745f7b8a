"""A target from a GGUF file: metadata to dimensions, tensor names to ours, weights as trained.

GGUF's `llama` architecture (which also holds Mistral) stores the rows of q and k of each head
interleaved for its own RoPE: row 2i is row i of the half-split layout, row 2i + 1 row i + D/2. They
are put back here. `qwen2` and `qwen3` are stored as trained.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from dspark_trt.build.config import ConfigError, Rope, TargetDims, require
from dspark_trt.build.families import FAMILIES, Family, target_dims
from dspark_trt.build.gguf_file import GgufFile
from dspark_trt.build.gguf_tokenizer import eos_token_ids, tokenizer_from_metadata
from dspark_trt.build.json_file import Fields
from dspark_trt.build.source import CheckpointError, TargetCheckpoint, TokenizerFiles, naming
from dspark_trt.build.tokenizer_files import check_vocabulary, read_tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PERMUTED = ("llama",)
OUTER = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Metadata `<architecture>.<key>` -> field of config.json.
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
FREQUENCIES = "rope_freqs.weight"
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0  # every published Llama 3 model has these
LLAMA3_ORIGINAL = 8192
FREQUENCY_TOLERANCE = 1e-4  # relative; the file holds float32


class GgufWeights:
    """The tensors of a GGUF file under canonical names: a `WeightSource`."""

    def __init__(self, file: GgufFile, dims: TargetDims, *, permuted: bool) -> None:
        self.path = file.path
        self._file = file
        self._where = canonical_names(file)
        layer = dims.layer
        self._heads = {"q_proj": layer.num_heads, "k_proj": layer.num_kv_heads} if permuted else {}

    def names(self) -> list[str]:
        """Every tensor, in order of name."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`."""
        return self._file.tensors[self._where[name]].shape

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor as it was trained, checked to be finite."""
        values = self._file.tensor(self._where[name])
        parts = name.split(".")
        heads = self._heads.get(parts[-2], 0) if len(parts) > 1 else 0
        return half_split_rows(values, heads) if heads else values


def half_split_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows [H * D, ...] from interleaved pairs (i, i + D/2) to the half-split order."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def canonical_names(file: GgufFile) -> dict[str, str]:
    """Canonical name -> name in the file; names without a meaning here are kept as they are."""
    where: dict[str, str] = {}
    for stored in file.tensors:
        if stored == FREQUENCIES:
            continue  # read into the Rope of the dims
        name = OUTER.get(stored, stored)
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
        if match and match[2] in INNER:
            name = f"layers.{int(match[1])}.{INNER[match[2]]}.{match[3]}"
        if name in where:
            raise CheckpointError(
                f"{file.path}: tensors {where[name]} and {stored} are both {name}"
            )
        where[name] = stored
    return where


def open_gguf(path: Path, tokenizer_folder: Path | None = None) -> TargetCheckpoint:
    """Open a GGUF file; reads metadata and the tensor table, no weights."""
    file = GgufFile(path)
    with naming(path):
        family, architecture = _family(file)
        dims = _dims(file, family, architecture)
        tokenizer: TokenizerFiles
        if tokenizer_folder is None:
            tokenizer = tokenizer_from_metadata(file)
        else:
            tokenizer = read_tokenizer(tokenizer_folder, eos_token_ids(file))
        ends = tokenizer.config["eos_token_ids"]
        assert isinstance(ends, list)
        dims = replace(dims, eos_token_ids=tuple(ends))
    check_vocabulary(tokenizer, dims.vocab_size, where=tokenizer_folder or path)
    return TargetCheckpoint(
        source_format="gguf",
        dims=dims,
        weights=GgufWeights(file, dims, permuted=architecture in PERMUTED),
        weight_dtype=_main_type(file),
        tokenizer=tokenizer,
        generation_config={},
        files=(path,),
    )


def _family(file: GgufFile) -> tuple[Family, str]:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture {architecture!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return FAMILIES[ARCHITECTURES[architecture]], architecture


def _main_type(file: GgufFile) -> str:
    """Name of the type of most of the layers' bytes (embeddings are often kept wider)."""
    totals: dict[GGMLQuantizationType, int] = {}
    for name, item in file.tensors.items():
        if name.startswith("blk."):
            totals[item.kind] = totals.get(item.kind, 0) + item.size
    return max(totals, key=lambda kind: totals[kind]).name if totals else "F32"


def _dims(file: GgufFile, family: Family, architecture: str) -> TargetDims:
    """Dimensions from metadata; what GGUF does not state is read off the tensor table."""
    metadata = file.metadata
    required = [f"{architecture}.{key}" for key in KEYS if key != "attention.head_count_kv"]
    for key in required:
        if key not in metadata and not key.endswith("rope.freq_base"):
            raise ConfigError(f"{file.path}: metadata {key} is missing: the GGUF is incomplete")
    values: dict[str, object] = {
        field: metadata[f"{architecture}.{key}"]
        for key, field in KEYS.items()
        if f"{architecture}.{key}" in metadata
    }
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    values["vocab_size"] = embedding.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["head_dim"] = _head_dim(file, architecture, values)
    window = metadata.get(f"{architecture}.attention.sliding_window")
    if architecture == "llama" and isinstance(window, int) and window > 0:
        family = FAMILIES["MistralForCausalLM"]
        values["sliding_window"] = window
    require(
        metadata.get("split.count", 1) in (0, 1),
        f"the model is split over {metadata.get('split.count')} GGUF files: merge them into one",
    )
    for key in (f"{architecture}.expert_count", f"{architecture}.attention.scale"):
        require(not metadata.get(key), f"metadata {key} {metadata.get(key)!r} is not supported")
    dims = target_dims(Fields(str(file.path), values), family)
    rope = _rope(file, architecture, dims)
    layer = replace(
        dims.layer,
        rope=rope,
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )
    return replace(dims, layer=layer)


def _head_dim(file: GgufFile, architecture: str, values: dict[str, object]) -> object:
    """attention.key_length, else hidden / heads; RoPE must cover all of it."""
    metadata = file.metadata
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise ConfigError(
            f"{file.path}: attention.head_count must be an integer >= 1, got {heads!r}"
        )
    rotary = metadata.get(f"{architecture}.rope.dimension_count")
    head_dim = metadata.get(f"{architecture}.attention.key_length", hidden // heads)
    value_dim = metadata.get(f"{architecture}.attention.value_length", head_dim)
    require(
        head_dim == value_dim and rotary in (None, head_dim),
        f"{file.path}: {architecture}.attention.key_length ({head_dim}), value_length "
        f"({value_dim}) and rope.dimension_count ({rotary}) must be equal",
    )
    return head_dim


def _rope(file: GgufFile, architecture: str, dims: TargetDims) -> Rope:
    """RoPE with the scaling that the metadata or the tensor of frequency factors states."""
    theta = dims.layer.rope.theta
    prefix = f"{architecture}.rope.scaling"
    old = file.metadata.get(f"{architecture}.rope.scale_linear", 1.0)  # before scaling.type was
    kind = file.metadata.get(f"{prefix}.type", "none" if old == 1.0 else "linear")
    factor = file.metadata.get(f"{prefix}.factor", old)
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"{file.path}: {prefix}.type {kind!r} is not supported; supported are none, linear and "
            "Llama 3's frequency factors"
        )
    if FREQUENCIES in file.tensors:
        return _llama3_rope(file, theta, dims.layer.head_dim)
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        raise ConfigError(f"{file.path}: {prefix}.factor must be a number > 0, got {factor!r}")
    return Rope(theta, linear_factor=float(factor) if kind == "linear" else 1.0)


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> Rope:
    """The Llama 3 scaling whose factors `rope_freqs.weight` [D / 2] holds.

    Converters divide every frequency by its stored factor; the largest is the scaling's `factor`,
    the other parameters are Llama 3's published ones, and all D / 2 factors must agree with them.
    """
    stored = file.tensor(FREQUENCIES)
    if stored.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {FREQUENCIES} has shape {list(stored.shape)}, expected "
            f"[{head_dim // 2}]"
        )
    if np.all(stored == 1.0):
        return Rope(theta)
    factor = round(float(stored.max()), 3)
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = (LLAMA3_ORIGINAL / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=FREQUENCY_TOLERANCE, atol=0):
        raise ConfigError(
            f"{file.path}: tensor {FREQUENCIES} is not Llama 3's scaling (factor {factor}, low "
            f"{LLAMA3_LOW:g}, high {LLAMA3_HIGH:g}, original length {LLAMA3_ORIGINAL}): this RoPE "
            "scaling is not supported"
        )
    return Rope(theta, llama3=(factor, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL))
