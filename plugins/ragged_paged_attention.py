"""RaggedPagedAttention: packed queries over the paged K/V of their own request.

Row n belongs to the request r with cu_seqlens[r] <= n < cu_seqlens[r + 1]. A target row at
position t sees the positions <= t of its request (and > t - window with a sliding window), its own
among them: K and V are written before. With a block (the drafter's form) a row sees every position
< kv_lens[r], the context, and all rows of its own request's block in both directions; block K/V are
dense inputs and never in the pages.

    out[n] = softmax(scale * q[n] . K) V,   query head h reading K/V head h // (H / KVH)

Padding rows (n >= cu_seqlens[R]) give values nobody reads.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx

from dspark_trt.plugins.graph import GraphWriter, make_function

INPUTS = (
    "q",  # [N, H, D]
    "k_pages",  # [P, page_size, KVH, D]
    "v_pages",  # [P, page_size, KVH, D]
    "page_table",  # [R, pages of the longest request] int32
    "cu_seqlens",  # [R + 1] int32, first 0
    "kv_lens",  # [R] int32: keys of the request in its pages, this step's rows included
)
BLOCK_INPUTS = (
    "block_k",  # [N, KVH, D]
    "block_v",  # [N, KVH, D]
)
ATTRIBUTES = ("scale", "window", "block")

_ONE = np.int32(1)


@cache
def ragged_paged_attention(
    *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, window: int, block: bool
) -> onnx.FunctionProto:
    """The operator for these dimensions. `window` 0 = full attention."""
    group = num_heads // num_kv_heads

    def body(g: GraphWriter) -> list[str]:
        # Requests padded to the longest: [R, Q] rows. All of this is the same for every layer and
        # is computed once (ONNX Runtime merges equal subexpressions).
        starts = g.slice_axis("cu_seqlens", 0, -1, 0)
        lens = g.Sub(g.slice_axis("cu_seqlens", 1, np.iinfo(np.int64).max, 0), starts)
        longest = g.Reshape(g.int64(g.ReduceMax(lens, keepdims=0)), [1])
        column = g.Unsqueeze(g.range(longest), [0])  # [1, Q]
        last_row = g.int32(g.Sub(g.dim("q", 0), 1))
        rows = g.Min(g.Add(g.Unsqueeze(starts, [1]), column), last_row)  # [R, Q]
        pages = g.Div(g.Add(g.ReduceMax("kv_lens", keepdims=0), np.int32(page_size - 1)),
                      np.int32(page_size))
        pages = g.Reshape(g.int64(g.Max(pages, _ONE)), [1])
        table = g.slice_axis("page_table", 0, pages, 1)
        keys = g.Unsqueeze(g.range(g.Mul(pages, page_size)), [0, 1])  # [1, 1, L]
        total = g.Unsqueeze("kv_lens", [1, 2])  # [R, 1, 1]
        if block:
            visible = g.Less(keys, total)  # [R, 1, L]
        else:
            first = g.Unsqueeze(g.Sub("kv_lens", lens), [1])
            position = g.Unsqueeze(g.Add(first, column), [2])  # [R, Q, 1]
            visible = g.LessOrEqual(keys, position)  # [R, Q, L]
            if window:
                visible = g.And(visible, g.Greater(keys, g.Sub(position, np.int32(window))))
        repeat = g.Concat([1, 1, group], longest, [1], axis=0)

        def mask_of(seen: str) -> str:  # [R, Q or 1, keys] -> [R, 1, group * Q, keys]
            return g.Reshape(
                g.Expand(g.Unsqueeze(g.Where(seen, np.float32(0), np.float32(-np.inf)), [1, 2]),
                         repeat),
                g.Concat(g.dim(rows, 0), [1], g.Mul(longest, group), [-1], axis=0),
            )

        def heads(x: str) -> str:  # [R, keys, KVH, D] -> [R, KVH, keys, D]
            return g.Transpose(x, perm=[0, 2, 1, 3])

        q = g.Mul(g.Gather("q", rows), np.float32(head_dim**-0.5))  # [R, Q, H, D]
        q = g.Transpose(g.Reshape(q, [0, 0, num_kv_heads, group, head_dim]), perm=[0, 2, 3, 1, 4])
        q = g.Reshape(q, [0, 0, -1, head_dim])  # [R, KVH, group * Q, D]

        flat = [0, -1, num_kv_heads, head_dim]
        k = g.Reshape(g.Gather("k_pages", table), flat)  # [R, L, KVH, D]
        v = heads(g.Reshape(g.Gather("v_pages", table), flat))
        scores = g.Add(g.MatMul(q, g.Transpose(k, perm=[0, 2, 3, 1])), mask_of(visible))
        if block:
            own = g.Less(g.Unsqueeze(column, [0]), g.Unsqueeze(lens, [1, 2]))  # [R, 1, Q]
            block_k = g.Transpose(g.Gather("block_k", rows), perm=[0, 2, 3, 1])
            block_scores = g.Add(g.MatMul(q, block_k), mask_of(own))
            sizes = g.Concat(g.dim(scores, 3), longest, axis=0)
            law = g.Softmax(g.Concat(scores, block_scores, axis=-1), axis=-1)
            context_law, block_law = g.op("Split", [law, sizes], outputs=2, axis=3)
            out = g.Add(
                g.MatMul(context_law, v), g.MatMul(block_law, heads(g.Gather("block_v", rows)))
            )
        else:
            out = g.MatMul(g.Softmax(scores, axis=-1), v)
        # [R, KVH, group * Q, D] -> [R * Q, H, D] -> [N, H, D]
        out = g.Reshape(out, g.Concat([0, 0, group], longest, [head_dim], axis=0))
        out = g.Reshape(g.Transpose(out, perm=[0, 3, 1, 2, 4]), [-1, num_heads, head_dim])
        n = g.range(g.dim("q", 0))
        request, within = row_owner(g, n, "cu_seqlens")
        padded = g.Add(g.Mul(request, g.int32(longest)), g.Min(within, g.Sub(g.int32(longest), _ONE)))
        return [g.Gather(out, padded)]

    name = f"h{num_heads}kv{num_kv_heads}d{head_dim}p{page_size}w{window}"
    return make_function(
        "RaggedPagedAttention",
        INPUTS + BLOCK_INPUTS if block else INPUTS,
        ("out",),
        body,
        overload=name + ("block" if block else ""),
        attributes=ATTRIBUTES,
    )


def row_owner(g: GraphWriter, rows: str, cu_seqlens: str) -> tuple[str, str]:
    """The request of each row and the row's index within it, both int32 like `rows` [N].

    Rows past the last request are given to the last one.
    """
    ends = g.slice_axis(cu_seqlens, 1, np.iinfo(np.int64).max, 0)
    passed = g.GreaterOrEqual(g.Unsqueeze(rows, [1]), g.Unsqueeze(ends, [0]))  # [N, R]
    request = g.ReduceSum(g.int32(passed), [1], keepdims=0)
    last = g.int32(g.Sub(g.dim(ends, 0), 1))
    request = g.Min(request, last)
    return request, g.Sub(rows, g.Gather(cu_seqlens, request))
