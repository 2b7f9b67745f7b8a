"""The target in torch: a forward pass over packed rows, and one decode step over cached slots.

Weights come from any checkpoint that `dspark build` takes, under canonical names; nothing of
Transformers is used. bfloat16 on CUDA, float32 elsewhere. No gradient anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from dspark_trt.build.config import LayerDims
from dspark_trt.build.source import TargetCheckpoint, WeightSource
from dspark_trt.tools.train.attention import Mask, attend, document_rule, mask_of
from dspark_trt.tools.train.layer_math import product32, rms_norm, rope_table, rotate, swiglu


class Layer(NamedTuple):
    """One decoder layer; q, k, v and gate, up are stacked so that each is one product."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def project(x: Tensor, layer: Layer, dims: LayerDims, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """q [..., H, D], k and v [..., KVH, D] of `x` [..., E], normed and rotated."""
    heads, kv_heads, dim = dims.num_heads, dims.num_kv_heads, dims.head_dim
    normed = rms_norm(x, layer.input_norm, dims.rms_norm_eps)
    flat = linear(normed, layer.qkv, layer.qkv_bias)
    both = flat.unflatten(-1, (heads + 2 * kv_heads, dim))
    q, k, v = both.split([heads, kv_heads, kv_heads], dim=-2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, dims.rms_norm_eps)
        k = rms_norm(k, layer.k_norm, dims.rms_norm_eps)
    return [rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()]


def finish(x: Tensor, attended: Tensor, layer: Layer, dims: LayerDims) -> Tensor:
    """The layer's output [..., E] from its input and its attention's result [..., H * D]."""
    x = x + linear(attended, layer.o, layer.o_bias)
    normed = rms_norm(x, layer.post_norm, dims.rms_norm_eps)
    gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return x + linear(swiglu(gate, up), layer.down, layer.down_bias)


class TorchTarget:
    """A frozen target model on one device."""

    def __init__(
        self,
        checkpoint: TargetCheckpoint,
        device: torch.device,
        *,
        max_tokens: int,  # longest position that will be asked for
        compiled: bool = False,
    ) -> None:
        self.dims = checkpoint.dims
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        reader = _Reader(checkpoint.weights, device, self.dtype)
        self.embed = reader.tensor("embed_tokens.weight")  # [V, E]
        tied = self.dims.tie_word_embeddings
        self.lm_head = self.embed if tied else reader.tensor("lm_head.weight")  # [V, E]
        self.norm = reader.tensor("norm.weight")
        self.layers = [reader.layer(f"layers.{i}") for i in range(self.dims.num_layers)]
        layer = self.dims.layer
        self.rope = rope_table(layer.rope, layer.head_dim, max_tokens, device)
        self._project: Callable[..., list[Tensor]] = project
        self._finish: Callable[..., Tensor] = finish
        if compiled:
            self._project = torch.compile(project, dynamic=False)
            self._finish = torch.compile(finish, dynamic=False)

    def masks(self, document: Tensor, attention: str) -> dict[int, Mask]:
        """Window -> mask, for every window that a layer has; `document` [B, T]."""
        batch, tokens = document.shape
        return {
            window: mask_of(
                document_rule(document, window),
                attention=attention,
                batch=batch,
                queries=tokens,
                keys=tokens,
                device=self.device,
            )
            for window in set(self.dims.sliding_windows)
        }

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        positions: Tensor,  # [B, T] int64, from 0 in each document
        masks: dict[int, Mask],
        feature_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """(features [B, T, len(ids) * E], hidden [B, T, E] before lm_head and after the norm)."""
        cos, sin = self.rope[0][positions], self.rope[1][positions]
        x = self.embed[tokens]
        kept = {-1: x}
        for index, layer in enumerate(self.layers):
            q, k, v = self._project(x, layer, self.dims.layer, cos, sin)
            mask = masks[self.dims.sliding_windows[index]]
            x = self._finish(x, attend(q, k, v, mask), layer, self.dims.layer)
            if index in feature_layers:
                kept[index] = x
        features = torch.cat([kept[index] for index in feature_layers], dim=-1)
        return features, rms_norm(x, self.norm, self.dims.layer.rms_norm_eps)

    @torch.no_grad()
    def decode(
        self,
        tokens: Tensor,  # [S] int64
        positions: Tensor,  # [S] int64
        caches: list[tuple[Tensor, Tensor]],  # a layer's k and v: [S, T, KVH, D]
        attention: Callable[..., Tensor],  # decode_attention or sdpa_decode
    ) -> Tensor:
        """Logits [S, V] float32 after one more token a slot; writes the caches in place."""
        cos, sin = self.rope[0][positions], self.rope[1][positions]
        slots = torch.arange(len(tokens), device=self.device)
        lengths = positions + 1
        x = self.embed[tokens]
        for layer, cache, window in zip(self.layers, caches, self.dims.sliding_windows):
            q, k, v = self._project(x, layer, self.dims.layer, cos, sin)
            cache[0][slots, positions] = k
            cache[1][slots, positions] = v
            attended = attention(q, cache[0], cache[1], lengths, window)
            x = self._finish(x, attended, layer, self.dims.layer)
        return self.logits(rms_norm(x, self.norm, self.dims.layer.rms_norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 of normed hidden states [N, E]."""
        return product32(hidden, self.lm_head)


class _Reader:
    """Tensors of a checkpoint on the device."""

    def __init__(self, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype
        self._names = set(weights.names())

    def tensor(self, *names: str) -> Tensor:
        """The tensors, one below the other."""
        parts = [torch.from_numpy(self._weights.tensor(name)) for name in names]
        return torch.cat(parts).to(self._device, self._dtype).contiguous()

    def optional(self, *names: str) -> Tensor | None:
        return self.tensor(*names) if names[0] in self._names else None

    def layer(self, prefix: str) -> Layer:
        qkv = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        gate_up = [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")]
        o, down = f"{prefix}.self_attn.o_proj", f"{prefix}.mlp.down_proj"
        return Layer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=self.tensor(*(f"{name}.weight" for name in qkv)),
            qkv_bias=self.optional(*(f"{name}.bias" for name in qkv)),
            q_norm=self.optional(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=self.optional(f"{prefix}.self_attn.k_norm.weight"),
            o=self.tensor(f"{o}.weight"),
            o_bias=self.optional(f"{o}.bias"),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self.tensor(*(f"{name}.weight" for name in gate_up)),
            gate_up_bias=self.optional(*(f"{name}.bias" for name in gate_up)),
            down=self.tensor(f"{down}.weight"),
            down_bias=self.optional(f"{down}.bias"),
        )
