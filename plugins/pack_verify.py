"""PackVerify: how far each draft is verified, and the packed rows of the step.

Sequences of a step are C prefill chunks, whose lengths the host knows, then B decoding requests,
whose lengths it need not know; R = C + B. Rows are packed in that order, padding last.

Allocation: every (r, k) with k <= caps[r] has the log-survival  s_{r,k} = sum_{i<=k} log sigmoid(
conf_logits[r,i] / sts[i]);  the `budget` pairs of largest s are verified, ties by (position,
request); pairs whose survival is 0 or not a number are not in the pool. s falls along k, so what
is taken is a prefix of each draft: lengths[r]. Nothing here reads a token, so the admission of
(r, k) never depends on x_{r,k}.

Packing: a decoding request's rows are its anchor (`last_token`) and its first lengths[r] drafts, at
positions kv_len[slot], kv_len[slot] + 1, ...; a chunk's rows are `tokens_in`'s.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx

from dspark_trt.plugins.graph import GraphWriter, make_function

INPUTS = (
    "tokens_in",  # [N] int32: the chunks' tokens; what stands in later rows is not read
    "slots",  # [R] int32, in [0, S)
    "chunk_lens",  # [C] int32
    "last_token",  # [S] int32 (state)
    "kv_len",  # [S] int32 (state)
    "page_table",  # [S, pages of the longest context] int32 (state)
)
DRAFT_INPUTS = (
    "draft_tokens",  # [B, G] int32
    "conf_logits",  # [B, G] f32
    "sts",  # [G] f32 temperatures of the confidence logits
    "caps",  # [B] int32, in [0, G]: the host's bound on each length
    "budget",  # [1] int64: K
)
OUTPUTS = (
    "lengths",  # [B] int32
    "cu_seqlens",  # [R + 1] int32
    "tokens",  # [N] int32
    "positions",  # [N] int32
    "pages",  # [N] int32, -1 for padding rows
    "offsets",  # [N] int32
    "tables",  # [R, ...] int32: page_table of the step's slots
    "kv_lens",  # [R] int32: kv_len with this step's rows
    "requests",  # [N] int32: the sequence of each row; padding rows are given to the last
)

_ZERO, _ONE = np.int32(0), np.int32(1)
_END = np.iinfo(np.int64).max


@cache
def pack_verify(*, page_size: int, block_size: int) -> onnx.FunctionProto:
    """The operator; `block_size` 0 = an engine without a drafter (no DRAFT_INPUTS)."""

    def body(g: GraphWriter) -> list[str]:
        decoding = g.slice_axis("slots", g.dim("chunk_lens", 0), _END, 0)  # [B]
        own = g.Unsqueeze(g.Gather("last_token", decoding), [1])
        if block_size:
            lengths = allocate(g, block_size)
            own = g.Concat(own, "draft_tokens", axis=1)  # [B, G + 1]
        else:
            lengths = g.Mul(decoding, _ZERO)
        lens = g.Concat("chunk_lens", g.Add(lengths, _ONE), axis=0)  # [R]
        cu_seqlens = g.Concat(np.zeros(1, np.int32), g.CumSum(lens, np.int64(0)), axis=0)
        n = g.range(g.dim("tokens_in", 0))
        request, within = row_owner(g, n, cu_seqlens)
        real = g.Less(n, g.slice_axis(cu_seqlens, -1, _END, 0))
        tokens = row_tokens(g, own, request, within, real, block_size)

        starts = g.Gather("kv_len", "slots")
        tables = g.Gather("page_table", "slots")
        positions = g.Where(real, g.Add(g.Gather(starts, request), within), _ZERO)
        column = g.Div(positions, np.int32(page_size))
        where = g.Concat(g.Unsqueeze(request, [1]), g.Unsqueeze(column, [1]), axis=1)
        pages = g.Where(real, g.GatherND(tables, g.int64(where)), np.int32(-1))
        offsets = g.Mod(positions, np.int32(page_size))
        kv_lens = g.Add(starts, lens)
        return [
            lengths, cu_seqlens, tokens, positions, pages, offsets, tables, kv_lens, request,
        ]  # fmt: skip

    return make_function(
        "PackVerify",
        INPUTS + DRAFT_INPUTS if block_size else INPUTS,
        OUTPUTS,
        body,
        overload=f"g{block_size}p{page_size}",
        attributes=("page_size",),
    )


def allocate(g: GraphWriter, block_size: int) -> str:
    """`lengths` [B] int32: the counts of each request among the `budget` likeliest pairs."""
    infinity = np.float32(np.inf)
    # log sigmoid(c) = -softplus(-c)
    log_conf = g.Neg(g.Softplus(g.Neg(g.Div("conf_logits", "sts"))))
    # Softplus(inf) is inf and Softplus(nan) nan; a survival that is not a number counts as none.
    log_conf = g.Where(g.IsNaN(log_conf), -infinity, log_conf)
    survival = g.CumSum(log_conf, np.int64(1))  # [B, G], never rising along k
    k = np.arange(1, block_size + 1, dtype=np.int32)[None]
    capped = g.Where(g.LessOrEqual(k, g.Unsqueeze("caps", [1])), survival, -infinity)
    # Position-major, so that TopK's rule for ties (the lower index) is (position, request).
    pool = g.Reshape(g.Transpose(capped, perm=[1, 0]), [-1])
    size = g.Min("budget", g.dim(pool, 0))
    best, index = g.op("TopK", [pool, size], outputs=2, axis=0, largest=1, sorted=1)
    taken = g.int32(g.Greater(best, -infinity))
    chosen = g.ScatterElements(g.Expand(_ZERO, g.Shape(pool)), index, taken)
    # allowzero: B is 0 in a step of chunks alone, not "as in the input".
    size = g.Concat([block_size], g.dim("caps", 0), axis=0)
    grid = g.Reshape(chosen, size, allowzero=1)
    return g.ReduceSum(grid, [0], keepdims=0)


def row_tokens(
    g: GraphWriter,
    own: str,  # [B, G + 1] int32: anchor and drafts of the decoding requests
    request: str,  # [N] int32
    within: str,  # [N] int32
    real: str,  # [N] bool, false for padding rows
    block_size: int,
) -> str:
    """The token of each row [N] int32, 0 for padding rows."""
    # One spare entry, so that a step of chunks alone has something to point at.
    own = g.Concat(g.Reshape(own, [-1]), np.zeros(1, np.int32), axis=0)
    decode = g.Sub(request, g.int32(g.dim("chunk_lens", 0)))
    is_decode = g.And(g.GreaterOrEqual(decode, _ZERO), real)
    cell = g.Add(g.Mul(decode, np.int32(block_size + 1)), within)
    drafted = g.Gather(own, g.Where(is_decode, cell, _ZERO))
    return g.Where(is_decode, drafted, g.Where(real, "tokens_in", _ZERO))


def row_owner(g: GraphWriter, rows: str, cu_seqlens: str) -> tuple[str, str]:
    """The request of each row and the row's index within it, both int32 like `rows` [N].

    Rows past the last request are given to the last one.
    """
    ends = g.slice_axis(cu_seqlens, 1, _END, 0)
    passed = g.GreaterOrEqual(g.Unsqueeze(rows, [1]), g.Unsqueeze(ends, [0]))  # [N, R]
    request = g.ReduceSum(g.int32(passed), [1], keepdims=0)
    last = g.int32(g.Sub(g.dim(ends, 0), 1))
    request = g.Min(request, last)
    return request, g.Sub(rows, g.Gather(cu_seqlens, request))
