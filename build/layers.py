"""Decoder layers as graph fragments over packed rows [N, ...]; shared by target and drafter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from dspark_trt.build.config import LayerDims, Rope
from dspark_trt.build.graph import ModelWriter
from dspark_trt.build.quantize import Quantizer
from dspark_trt.build.source import WeightSource


@dataclass(frozen=True, slots=True)
class LayerWriter:
    """Writes the fragments of one model's layers; `prefix` keeps its weights apart in the file."""

    g: ModelWriter
    source: WeightSource
    dims: LayerDims
    prefix: str
    quantizer: Quantizer

    def linear(self, x: str, *names: str, bias: bool = False) -> str:
        """x [N, in] times the weights `names` stacked along their outputs -> [N, out]."""
        weight = self.prefix + "+".join(names)
        biases = ""
        if bias:
            biases = self.g.weight(
                f"{weight}.bias",
                np.concatenate([self.source.tensor(f"{n}.bias") for n in names]),
            )

        def load() -> np.ndarray:
            parts = [self.source.tensor(f"{n}.weight") for n in names]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        shapes = [self.source.shape(f"{n}.weight") for n in names]
        shape = (sum(s[0] for s in shapes), shapes[0][1])
        return self.quantizer.matmul(
            self.g, x, f"{weight}.weight", shape=shape, load=load, bias=biases
        )

    def norm(self, x: str, name: str) -> str:
        """RMSNorm over the last axis."""
        weight = self.g.weight(self.prefix + name, self.source.tensor(name))
        return rms_norm(self.g, x, weight, self.dims.rms_norm_eps)

    def qkv(self, x: str, layer: int, cos_sin: tuple[str, str]) -> tuple[str, str, str]:
        """q [N, H, D], k and v [N, KVH, D] of one layer, normed and rotated."""
        d = self.dims
        attention = f"layers.{layer}.self_attn."
        parts = [f"{attention}{p}_proj" for p in "qkv"]
        packed = self.linear(x, *parts, bias=d.qkv_bias)
        packed = self.g.Reshape(packed, [-1, d.num_heads + 2 * d.num_kv_heads, d.head_dim])
        if d.qk_norm:
            sizes = [d.num_heads, d.num_kv_heads, d.num_kv_heads]
            q, k, v = self.g.op("Split", [packed, sizes], outputs=3, axis=1)
            q = self.rotate(self.norm(q, f"{attention}q_norm.weight"), cos_sin)
            k = self.rotate(self.norm(k, f"{attention}k_norm.weight"), cos_sin)
            return q, k, v
        # q and k rotate alike: once, before they part.
        sizes = [d.num_heads + d.num_kv_heads, d.num_kv_heads]
        qk, v = self.g.op("Split", [packed, sizes], outputs=2, axis=1)
        q, k = self.g.op(
            "Split",
            [self.rotate(qk, cos_sin), [d.num_heads, d.num_kv_heads]],
            outputs=2,
            axis=1,
        )
        return q, k, v

    def context_kv(self, x: str, layer: int, cos_sin: tuple[str, str]) -> tuple[str, str]:
        """KV injection: k and v [N, KVH, D] of context features x [N, E] (no input norm)."""
        d = self.dims
        attention = f"layers.{layer}.self_attn."
        packed = self.linear(x, f"{attention}k_proj", f"{attention}v_proj", bias=d.qkv_bias)
        packed = self.g.Reshape(packed, [-1, 2 * d.num_kv_heads, d.head_dim])
        k, v = self.g.op("Split", [packed], outputs=2, axis=1, num_outputs=2)
        if d.qk_norm:
            k = self.norm(k, f"{attention}k_norm.weight")
        return self.rotate(k, cos_sin), v

    def rotate(self, x: str, cos_sin: tuple[str, str]) -> str:
        """RoPE on x [N, heads, D], the two halves of D being the pairs."""
        cos, sin = cos_sin
        g = self.g
        a, b = g.op("Split", [x], outputs=2, axis=2, num_outputs=2)
        return g.Concat(
            g.Sub(g.Mul(a, cos), g.Mul(b, sin)), g.Add(g.Mul(b, cos), g.Mul(a, sin)), axis=2
        )

    def attention_out(self, residual: str, out: str, layer: int) -> str:
        """residual [N, E] + o_proj(out [N, H, D])."""
        d = self.dims
        flat = self.g.Reshape(out, [-1, d.num_heads * d.head_dim])
        o = self.linear(flat, f"layers.{layer}.self_attn.o_proj", bias=d.o_bias)
        return self.g.Add(residual, o)

    def mlp(self, residual: str, layer: int) -> str:
        """residual [N, E] + down(silu(gate(x)) * up(x)), x the normed residual."""
        g, bias = self.g, self.dims.mlp_bias
        x = self.norm(residual, f"layers.{layer}.post_attention_layernorm.weight")
        mlp = f"layers.{layer}.mlp."
        both = self.linear(x, f"{mlp}gate_proj", f"{mlp}up_proj", bias=bias)
        gate, up = g.op("Split", [both], outputs=2, axis=1, num_outputs=2)
        x = g.Mul(g.Mul(gate, g.Sigmoid(gate)), up)
        return g.Add(residual, self.linear(x, f"{mlp}down_proj", bias=bias))


def rms_norm(g: ModelWriter, x: str, weight: str, eps: float) -> str:
    """x / sqrt(mean(x^2) + eps) * weight; the pattern that ONNX Runtime and TensorRT fuse."""
    mean = g.ReduceMean(g.Pow(x, np.float32(2)), [-1], keepdims=1)
    return g.Mul(g.Div(x, g.Sqrt(g.Add(mean, np.float32(eps)))), weight)


def rope_tables(g: ModelWriter, rope: Rope, head_dim: int, positions: str) -> tuple[str, str]:
    """cos and sin [N, 1, D / 2] f32 of `positions` [N] int32."""
    angles = g.Mul(
        g.Unsqueeze(g.Cast(positions, to=TensorProto.FLOAT), [1, 2]),
        inverse_frequencies(rope, head_dim)[None, None],
    )
    return g.Cos(angles), g.Sin(angles)


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """RoPE's angle per position [D / 2] f32.

    Llama 3's scaling keeps wavelengths shorter than original / high_freq_factor, divides those
    longer than original / low_freq_factor by `factor`, and blends linearly in between.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    inv = inv / np.float32(rope.linear_factor)
    if rope.llama3 is None:
        return inv
    factor, low, high, original = rope.llama3
    wavelength = 2 * math.pi / inv
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return ((1 - smooth) * inv / factor + smooth * inv).astype(np.float32)
