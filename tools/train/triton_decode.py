"""One query token a slot against a static cache, read only up to each slot's length.

`out[s, h] = softmax(q[s, h] k[s, :length[s]] / sqrt(D)) v`, one program a slot and KV head; the
query heads of a group share what it reads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # tokens read at a time


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    length_ptr,
    scale,
    window,
    max_tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(length_ptr + slot).to(tl.int32)
    first = tl.maximum(length - window, 0)
    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    q_at = (slot * KV_HEADS + head) * GROUP * DIM + group[:, None] * DIM + dim[None, :]
    q_in = (group < GROUP)[:, None] & (dim < DIM)[None, :]
    q = tl.load(q_ptr + q_at, mask=q_in, other=0.0)
    base = slot * max_tokens * KV_HEADS * DIM + head * DIM
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(first // BLOCK * BLOCK, length, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = (token < length) & (token >= first)
        at = base + token[:, None] * (KV_HEADS * DIM) + dim[None, :]
        mask = inside[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        peak = tl.maximum(highest, tl.max(score, 1))
        share = tl.exp(score - peak[:, None])
        kept = tl.exp(highest - peak)
        mixed = mixed * kept[:, None] + tl.dot(share.to(v.dtype), v)
        total = total * kept + tl.sum(share, 1)
        highest = peak
    tl.store(out_ptr + q_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_in)


def decode_attention(
    q: Tensor,  # [S, H, D]
    k: Tensor,  # [S, T, KVH, D]
    v: Tensor,  # [S, T, KVH, D]
    lengths: Tensor,  # [S] int, >= 1
    window: int = 0,  # tokens, the query's own included; 0 = all
) -> Tensor:
    """[S, H * D] in q's dtype; no host sync, may be captured in a graph."""
    slots, heads, dim = q.shape
    tokens, kv_heads = k.shape[1], k.shape[2]
    q = q.contiguous()
    out = torch.empty_like(q)
    _decode[(slots, kv_heads)](
        q,
        k,
        v,
        out,
        lengths,
        dim**-0.5,
        window or tokens,
        tokens,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        BLOCK=BLOCK,
    )
    return out.flatten(1)
