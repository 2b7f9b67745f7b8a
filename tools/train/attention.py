"""Attention under a mask that is written once, as a rule on indices.

A rule takes index tensors that broadcast, `rule(b, h, q, kv) -> bool`, as flex attention's
`mask_mod` does. `flex` makes it a block-sparse mask for a compiled kernel; `sdpa` a dense one for
`scaled_dot_product_attention`. Every query must be allowed at least one key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

Rule = Callable[[Any, Any, Any, Any], Tensor]
Mask: TypeAlias = Tensor | BlockMask


def chosen(attention: str, device: torch.device) -> str:
    """`auto` settled: flex on CUDA, sdpa elsewhere."""
    if attention != "auto":
        return attention
    return "flex" if device.type == "cuda" else "sdpa"


def mask_of(
    rule: Rule,
    *,
    attention: str,  # flex | sdpa
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
) -> Mask:
    """The mask of `rule` for `[batch, queries, keys]`; dense: bool [B, 1, Q, KV]."""
    if attention == "flex":
        return create_block_mask(rule, batch, None, queries, keys, device=device)
    b = torch.arange(batch, device=device)[:, None, None]
    q = torch.arange(queries, device=device)[None, :, None]
    kv = torch.arange(keys, device=device)[None, None, :]
    return rule(b, None, q, kv)[:, None]


def attend(
    q: Tensor,  # [B, Q, H, D]
    k: Tensor,  # [B, KV, KVH, D]
    v: Tensor,  # [B, KV, KVH, D]
    mask: Mask,
) -> Tensor:
    """softmax(q k / sqrt(D)) v under `mask`: [B, Q, H * D] in q's dtype."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        kernel = _compiled_flex() if q.device.type == "cuda" else flex_attention
        out = kernel(q, k, v, block_mask=mask, enable_gqa=grouped)
    else:
        if grouped:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def document_rule(
    document: Tensor,  # [B, T] int, one number a document of the row
    window: int,  # tokens, the query's own included; 0 = all
) -> Rule:
    """Causal attention inside each document."""

    def rule(b: Any, h: Any, q: Any, kv: Any) -> Tensor:
        allowed = (kv <= q) & (document[b, q] == document[b, kv])
        return allowed & (q - kv < window) if window else allowed

    return rule


def block_rule(
    document: Tensor,  # [B, T] int
    anchors: Tensor,  # [B, A] int, index in the row
    block_size: int,  # G
) -> Rule:
    """Queries are A blocks of G slots, keys the T positions of the row, then the same blocks.

    A slot sees the anchor's document strictly before the anchor, and its own block, both ways.
    """
    context = document.shape[1]

    def rule(b: Any, h: Any, q: Any, kv: Any) -> Tensor:
        block = q // block_size
        anchor = anchors[b, block]
        inside = kv < context
        at = torch.where(inside, kv, 0)
        seen = (at < anchor) & (document[b, at] == document[b, anchor])
        own = (kv - context) // block_size == block
        return torch.where(inside, seen, own)

    return rule
