"""RaggedPagedAttention: packed queries over the paged K/V of their own request.

Row n belongs to the request r with cu_seqlens[r] <= n < cu_seqlens[r + 1]. A target row at
position t sees the positions <= t of its request (and > t - window with a sliding window), its own
among them: K and V are written before. With a block (the drafter's form) a row sees every position
< kv_lens[r], the context, and all rows of its own request's block in both directions; block K/V are
dense inputs and never in the pages.

    out[n] = softmax(scale * q[n] . K) V,   query head h reading K/V head h // (H / KVH)

Padding rows (n >= cu_seqlens[R]) give values nobody reads. A key that a row does not see has no
weight in it even where it is NaN; values are finite (PagedKvWrite sees to it), as 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    "requests",  # [N] int32: the request of each row
)
BLOCK_INPUTS = (
    "block_k",  # [N, KVH, D]
    "block_v",  # [N, KVH, D]
)
ATTRIBUTES = ("scale", "window", "block")

_ONE = np.int32(1)
_END = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one body is written for. `window` 0 = full attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int = 0
    block: bool = False

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def overload(self) -> str:
        name = f"h{self.num_heads}kv{self.num_kv_heads}d{self.head_dim}p{self.page_size}"
        return f"{name}w{self.window}" + ("block" if self.block else "")


@cache
def ragged_paged_attention(shape: AttentionShape) -> onnx.FunctionProto:
    """The operator for these dimensions."""

    def body(g: GraphWriter) -> list[str]:
        # What depends on the layout alone is the same for every layer, and ONNX Runtime, which
        # merges equal subexpressions, computes it once.
        layout = _Layout(g, shape)
        q = padded_queries(g, shape, layout)
        keys = layout.pool_rows()
        k = g.Gather(g.Reshape("k_pages", [-1, shape.head_dim]), keys)  # [R, KVH, L, D]
        v = g.Gather(g.Reshape("v_pages", [-1, shape.head_dim]), keys)
        k = g.Transpose(k, perm=[0, 1, 3, 2])
        scores = masked_scores(g, shape, q, k, layout.context_mask())
        if shape.block:
            out = with_block(g, shape, layout, q, scores, v)
        else:
            out = g.MatMul(g.Softmax(scores, axis=-1), v)
        return [layout.packed(out)]

    return make_function(
        "RaggedPagedAttention",
        INPUTS + BLOCK_INPUTS if shape.block else INPUTS,
        ("out",),
        body,
        overload=shape.overload,
        attributes=ATTRIBUTES,
    )


class _Layout:
    """Requests padded to the longest: Q rows and L keys each."""

    def __init__(self, g: GraphWriter, shape: AttentionShape) -> None:
        self.g, self.shape = g, shape
        starts = g.slice_axis("cu_seqlens", 0, -1, 0)
        self.lens = g.Sub(g.slice_axis("cu_seqlens", 1, _END, 0), starts)
        self.longest = g.Reshape(g.int64(g.ReduceMax(self.lens, keepdims=0)), [1])  # Q
        self.column = g.Unsqueeze(g.range(self.longest), [0])  # [1, Q]
        last_row = g.Sub(g.slice_axis("cu_seqlens", -1, _END, 0), _ONE)
        rows = g.Min(g.Add(g.Unsqueeze(starts, [1]), self.column), last_row)
        self.rows = g.Max(rows, np.int32(0))  # [R, Q] row of each padded place
        size = np.int32(shape.page_size)
        pages = g.Div(g.Add(g.ReduceMax("kv_lens", keepdims=0), np.int32(size - 1)), size)
        self.pages = g.Reshape(g.int64(g.Max(pages, _ONE)), [1])  # of the longest request
        self.num_keys = g.Mul(self.pages, shape.page_size)  # L

    def pool_rows(self) -> str:
        """[R, KVH, L] int32: where each key lies in a pool seen as [P * page_size * KVH, D]."""
        g, shape = self.g, self.shape
        table = g.Unsqueeze(g.slice_axis("page_table", 0, self.pages, 1), [2])  # [R, pages, 1]
        offset = np.arange(shape.page_size, dtype=np.int32)
        slots = g.Add(g.Mul(table, np.int32(shape.page_size)), offset)
        slots = g.Reshape(slots, g.Concat([0, 1], self.num_keys, axis=0))  # [R, 1, L]
        head = np.arange(shape.num_kv_heads, dtype=np.int32)[:, None]
        return g.Add(g.Mul(slots, np.int32(shape.num_kv_heads)), head)

    def context_mask(self) -> str:
        """Which keys of the pages each padded row sees."""
        g, window = self.g, self.shape.window
        keys = g.Unsqueeze(g.range(self.num_keys), [0, 1])  # [1, 1, L]
        if self.shape.block:
            return self._mask(g.Less(keys, g.Unsqueeze("kv_lens", [1, 2])))
        first = g.Unsqueeze(g.Sub("kv_lens", self.lens), [1])
        position = g.Unsqueeze(g.Add(first, self.column), [2])  # [R, Q, 1]
        visible = g.LessOrEqual(keys, position)
        if window:
            visible = g.And(visible, g.Greater(keys, g.Sub(position, np.int32(window))))
        return self._mask(visible)

    def block_mask(self) -> str:
        """Which rows of its own block each padded row sees."""
        g = self.g
        return self._mask(g.Less(g.Unsqueeze(self.column, [0]), g.Unsqueeze(self.lens, [1, 2])))

    def _mask(self, visible: str) -> str:
        """[R, Q or 1, keys] bool -> [R, 1, group * Q, keys], the rows of each head in turn."""
        g, group = self.g, self.shape.group
        wide = g.Expand(
            g.Unsqueeze(visible, [1, 2]), g.Concat([1, 1, group], self.longest, [1], axis=0)
        )
        rows = g.Mul(self.longest, group)
        return g.Reshape(wide, g.Concat([0, 1], rows, g.dim(visible, 2), axis=0))

    def packed(self, out: str) -> str:
        """[R, KVH, group * Q, D] -> [N, H, D]."""
        g, shape = self.g, self.shape
        sizes = [0, 0, shape.group]
        out = g.Reshape(out, g.Concat(sizes, self.longest, [shape.head_dim], axis=0))
        out = g.Transpose(out, perm=[0, 3, 1, 2, 4])
        out = g.Reshape(out, [-1, shape.num_heads, shape.head_dim])
        n = g.range(g.dim("requests", 0))
        longest = g.int32(self.longest)
        within = g.Sub(n, g.Gather("cu_seqlens", "requests"))
        within = g.Min(within, g.Sub(longest, _ONE))  # padding rows
        return g.Gather(out, g.Add(g.Mul("requests", longest), within))


def padded_queries(g: GraphWriter, shape: AttentionShape, layout: _Layout) -> str:
    """[N, H, D] -> [R, KVH, group * Q, D]."""
    q = g.Gather("q", layout.rows)
    q = g.Reshape(q, [0, 0, shape.num_kv_heads, shape.group, shape.head_dim])
    return g.Reshape(g.Transpose(q, perm=[0, 2, 3, 1, 4]), [0, 0, -1, shape.head_dim])


def masked_scores(g: GraphWriter, shape: AttentionShape, q: str, k: str, mask: str) -> str:
    """scale * q k where `mask`, else -inf, whatever k is; [R, KVH, group * Q, keys].

    k is [R, KVH, D, keys].
    """
    scores = g.Mul(g.MatMul(q, k), np.float32(shape.head_dim**-0.5))
    return g.Where(mask, scores, np.float32(-np.inf))


def with_block(
    g: GraphWriter, shape: AttentionShape, layout: _Layout, q: str, scores: str, v: str
) -> str:
    """Attention over the context (its scores and values given) and the request's own block."""
    k = g.Transpose(g.Gather("block_k", layout.rows), perm=[0, 2, 3, 1])  # [R, KVH, D, Q]
    own = masked_scores(g, shape, q, k, layout.block_mask())
    law = g.Softmax(g.Concat(scores, own, axis=-1), axis=-1)
    sizes = g.Concat(layout.num_keys, layout.longest, axis=0)
    context_law, block_law = g.op("Split", [law, sizes], outputs=2, axis=3)
    block_v = g.Transpose(g.Gather("block_v", layout.rows), perm=[0, 2, 1, 3])
    return g.Add(g.MatMul(context_law, v), g.MatMul(block_law, block_v))
