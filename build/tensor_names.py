"""Which tensors the dimensions call for, under canonical names, and the check against a file."""

from __future__ import annotations

import logging

import numpy as np

from dspark_trt.build.config import DrafterDims, LayerDims, TargetDims
from dspark_trt.build.safetensors_file import mapped_or_read
from dspark_trt.build.source import CheckpointError, TargetCheckpoint, WeightSource

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]
COMPARED_ROWS = 4096  # rows of two equal tensors compared at a time
LISTED = 5  # names listed in one error


def layer_shapes(prefix: str, layer: LayerDims) -> Shapes:
    """The tensors of one decoder layer, `prefix` = `layers.N`."""
    e, d, inner = layer.hidden_size, layer.head_dim, layer.intermediate_size
    q, kv = layer.num_heads * d, layer.num_kv_heads * d
    linears = {
        "self_attn.q_proj": (q, e, layer.qkv_bias),
        "self_attn.k_proj": (kv, e, layer.qkv_bias),
        "self_attn.v_proj": (kv, e, layer.qkv_bias),
        "self_attn.o_proj": (e, q, layer.o_bias),
        "mlp.gate_proj": (inner, e, layer.mlp_bias),
        "mlp.up_proj": (inner, e, layer.mlp_bias),
        "mlp.down_proj": (e, inner, layer.mlp_bias),
    }
    shapes: Shapes = {
        f"{prefix}.input_layernorm.weight": (e,),
        f"{prefix}.post_attention_layernorm.weight": (e,),
    }
    for name, (out, width, bias) in linears.items():
        shapes[f"{prefix}.{name}.weight"] = (out, width)
        if bias:
            shapes[f"{prefix}.{name}.bias"] = (out,)
    if layer.qk_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (d,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (d,)
    return shapes


def target_shapes(dims: TargetDims) -> Shapes:
    """Every tensor a target of these dimensions has; `lm_head.weight` only where it is untied."""
    e, v = dims.layer.hidden_size, dims.vocab_size
    shapes: Shapes = {"embed_tokens.weight": (v, e), "norm.weight": (e,)}
    if not dims.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, e)
    for i in range(dims.num_layers):
        shapes |= layer_shapes(f"layers.{i}", dims.layer)
    return shapes


def drafter_shapes(dims: DrafterDims) -> Shapes:
    """Every tensor a drafter of these dimensions has."""
    e, v, r = dims.layer.hidden_size, dims.vocab_size, dims.markov_rank
    shapes: Shapes = {
        "norm.weight": (e,),
        "hidden_norm.weight": (e,),
        "fc.weight": (e, len(dims.target_layer_ids) * e),
    }
    if dims.own_embed_tokens:
        shapes["embed_tokens.weight"] = (v, e)
    if dims.own_lm_head:
        shapes["lm_head.weight"] = (v, e)
    for i in range(dims.num_layers):
        shapes |= layer_shapes(f"layers.{i}", dims.layer)
    if r:
        shapes |= {"markov_head.markov_w1.weight": (v, r), "markov_head.markov_w2.weight": (v, r)}
    if r and dims.markov_head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (r, e + r)
        shapes["markov_head.gate_proj.bias"] = (r,)
    if r and dims.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + e)
        shapes["markov_head.joint_proj.bias"] = (3 * r,)
    if dims.confidence_head:
        width = e + (r if dims.confidence_head_with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def check_shapes(
    weights: WeightSource, expected: Shapes, *, optional: Shapes | None = None
) -> None:
    """Refuse, by name, tensors that are missing, unknown or of another shape; reads no data."""
    optional = optional or {}
    found = set(weights.names())
    if missing := sorted(expected.keys() - found):
        raise CheckpointError(
            f"{weights.path}: {_listed(missing, 'missing')}: the config calls for it "
            f"(shape {list(expected[missing[0]])}); the checkpoint is incomplete or its config "
            "belongs to another one"
        )
    if unknown := sorted(found - expected.keys() - optional.keys()):
        raise CheckpointError(
            f"{weights.path}: {_listed(unknown, 'unknown')} "
            f"(shape {list(weights.shape(unknown[0]))}): the config does not call for it, so the "
            "model would not be computed as it was trained"
        )
    for name, shape in (expected | optional).items():
        if name in found and weights.shape(name) != shape:
            raise CheckpointError(
                f"{weights.path}: tensor {name} has shape {list(weights.shape(name))}, the config "
                f"calls for {list(shape)}"
            )


def _listed(names: list[str], what: str) -> str:
    """`tensor a is missing`, or `12 tensors are missing: a, b, ...`."""
    if len(names) == 1:
        return f"tensor {names[0]} is {what}"
    more = ", ..." if len(names) > LISTED else ""
    return f"{len(names)} tensors are {what}: {', '.join(names[:LISTED])}{more}"


def check_target_weights(ckpt: TargetCheckpoint) -> None:
    """Every tensor the dims call for is there with its shape, and no other.

    A tied model may carry `lm_head.weight` if it equals the embedding (it is then ignored, with a
    warning); an untied one must carry it. Only that comparison reads data.
    """
    dims = ckpt.dims
    head: Shapes = {"lm_head.weight": (dims.vocab_size, dims.layer.hidden_size)}
    check_shapes(ckpt.weights, target_shapes(dims), optional=head)
    if dims.tie_word_embeddings and "lm_head.weight" in ckpt.weights.names():
        if not equal_tensors(ckpt.weights, "lm_head.weight", ckpt.weights, "embed_tokens.weight"):
            raise CheckpointError(
                f"{ckpt.weights.path}: tie_word_embeddings is true but lm_head.weight differs from "
                "embed_tokens.weight: set tie_word_embeddings to false if the head is its own, or "
                "remove lm_head.weight"
            )
        logger.warning(
            "%s: lm_head.weight repeats embed_tokens.weight of a tied model: ignored",
            ckpt.weights.path,
        )


def equal_tensors(a: WeightSource, left: str, b: WeightSource, right: str) -> bool:
    """Whether two tensors hold the same values."""
    if a.shape(left) != b.shape(right):
        return False
    x, y = mapped_or_read(a, left), mapped_or_read(b, right)
    rows = range(0, x.shape[0], COMPARED_ROWS)
    return all(_equal(x[i : i + COMPARED_ROWS], y[i : i + COMPARED_ROWS]) for i in rows)


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays hold the same values: by their bytes where these agree, which is fast."""
    bits = f"u{x.itemsize}"
    if x.dtype == y.dtype and np.array_equal(x.view(bits), y.view(bits)):
        return True
    return np.array_equal(x.astype(np.float32), y.astype(np.float32))
