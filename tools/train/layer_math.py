"""What the layers of target and drafter have in common, as functions on tensors.

Heads stand before the last axis everywhere: `[..., heads, D]`. Sums of squares and rotations are
computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from dspark_trt.build.config import Rope
from dspark_trt.build.layers import inverse_frequencies


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / rms(x)` over the last axis, in x's dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * scaled.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on `[..., heads, D]`: dimension j turns with j + D / 2; cos, sin `[..., 1, D / 2]`."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return silu(gate) * up


def rope_table(rope: Rope, head_dim: int, length: int, device: torch.device) -> Tensor:
    """cos and sin of every position: [2, length, 1, D / 2] float32."""
    frequencies = torch.from_numpy(inverse_frequencies(rope, head_dim))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None]
    return torch.stack([angles.cos(), angles.sin()])[:, :, None].to(device)


def product32(x: Tensor, weight: Tensor) -> Tensor:
    """`x [N, E] @ weight [V, E]^T` in float32, whatever they are: half logits are too coarse."""
    if x.device.type == "cuda" and x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()
