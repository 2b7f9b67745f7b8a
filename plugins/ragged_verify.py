"""RaggedVerify: accept or reject each draft so that what comes out has exactly the target's law.

logits[m] is the target's row m; request r has the rows row_start[r] + k, k = 0 .. l_r, row k being
the law p_{k+1} of the token after [anchor, x_1 .. x_k] (a prompt's last chunk: one row, l = 0).
q_k is the law x_k was drawn from: softmax(draft_logits / draft_temperature), one-hot at 0.

    accept x_k            while u_accept[k] * q_k(x_k) < p_k(x_k)
    first rejection at k  draw from norm(max(p_k - q_k, 0)) with u_extra[0] (recover)
    all l accepted        draw from p_{l+1} with u_extra[1] (bonus)

p is the law after the request's sampling parameters, in this order: + bias, repetition penalty
(prompt and output), presence and frequency penalties (output, and prompt where penalty_prompt),
+ edits (bans), temperature, top-k, top-p, min-p. Row k counts its own x_1 .. x_k as output. At
temperature 0 p is one-hot at the argmax. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto

from dspark_trt.plugins.graph import GraphWriter, make_function
from dspark_trt.plugins.law_filters import Filters, filtered_law
from dspark_trt.plugins.sequential_head import inverse_cdf, tempered_law

SAMPLING = (  # by slot [S]
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "penalty_prompt", "bias_on",
)  # fmt: skip
INPUTS = (
    "logits",  # [M, V] f32, M >= 1
    "slots",  # [R] int32
    "chunk_rows",  # [C] int32: row of each chunk's last token, -1 where the prompt goes on
    "lengths",  # [B] int32: l
    "cu_seqlens",  # [R + 1] int32: rows of the step, of which the last M - (chunk rows) have logits
    "row_shift",  # [1] int64: M - N
    "u_extra",  # [R, 2] f32: recover, bonus
    "edit_seq", "edit_k", "edit_id",  # [Q] int32: request of the step, row, token
    "edit_value",  # [Q] f32, added to the logit; -inf = banned
    *SAMPLING,
    "prompt_counts", "output_counts",  # [S, V] int32
    "bias",  # [S, V] f32
)  # fmt: skip
DRAFT_INPUTS = (
    "u_accept",  # [B, G] f32
    "draft_tokens",  # [B, G] int32
    "draft_logits",  # [B, G, V] f32; may be empty where no row samples or nothing was drafted
    "draft_temperature",  # [S] f32
)
OUTPUTS = (
    "out_tokens",  # [R, G + 1] int32: accepted drafts, then the drawn token, then -1
    "n_out",  # [R] int32: tokens in the row; 0 where a prompt goes on
)

_ZERO, _ONE = np.int32(0), np.int32(1)
_END = np.iinfo(np.int64).max


@cache
def ragged_verify(*, block_size: int) -> onnx.FunctionProto:
    """The operator; `block_size` 0 = an engine without a drafter (no DRAFT_INPUTS)."""

    def body(g: GraphWriter) -> list[str]:
        rows = _Rows(g, block_size)
        logits = edited_logits(g, rows)
        best = g.int32(g.ArgMax(logits, axis=1, keepdims=0))  # [M]
        hot = g.Greater(rows.parameter("temperature"), np.float32(0))  # [M]
        some_hot = g.Greater(
            g.ReduceMax(g.Gather("temperature", "slots"), keepdims=0), np.float32(0)
        )

        def greedy(sub: GraphWriter) -> list[str]:
            accepted = count_accepted(sub, rows, greedy_accepts(sub, rows, best))
            return [accepted, sub.Gather(best, rows.final_row(sub, accepted))]

        def sampled(sub: GraphWriter) -> list[str]:
            law = target_law(sub, rows, logits, best, hot)
            if not block_size:
                accepted = sub.Mul(rows.lens, _ZERO)
                return [accepted, draw(sub, rows, law, accepted, None)]
            drafted = sub.Greater(sub.ReduceMax(rows.lens, keepdims=0), _ZERO)

            def with_drafts(inner: GraphWriter) -> list[str]:
                draft_law = drafted_law(inner, rows)
                accepted = count_accepted(inner, rows, law_accepts(inner, rows, law, draft_law))
                return [accepted, draw(inner, rows, law, accepted, draft_law)]

            def without(inner: GraphWriter) -> list[str]:
                accepted = inner.Mul(rows.lens, _ZERO)
                return [accepted, draw(inner, rows, law, accepted, None)]

            return sub.if_else(drafted, with_drafts, without, [TensorProto.INT32] * 2)

        accepted, last = g.if_else(some_hot, sampled, greedy, [TensorProto.INT32] * 2)
        return packed_output(g, rows, accepted, last, block_size)

    return make_function(
        "RaggedVerify",
        INPUTS + DRAFT_INPUTS if block_size else INPUTS,
        OUTPUTS,
        body,
        overload=f"g{block_size}",
    )


class _Rows:
    """Which request and which k each row of logits is; [R] tensors have chunks first (l = 0)."""

    def __init__(self, g: GraphWriter, block_size: int) -> None:
        self.block_size = block_size
        self.chunks = g.dim("chunk_rows", 0)  # C
        none = g.Mul("chunk_rows", _ZERO)
        self.lens = g.Concat(none, "lengths", axis=0)  # [R]
        starts = g.Add(g.slice_axis("cu_seqlens", 0, -1, 0), g.int32("row_shift"))
        starts = g.slice_axis(starts, self.chunks, _END, 0)
        self.start = g.Concat("chunk_rows", starts, axis=0)  # [R], -1 = no row
        self.emits = g.GreaterOrEqual(self.start, _ZERO)
        self.first = g.Max(self.start, _ZERO)
        m = g.Unsqueeze(g.range(g.dim("logits", 0)), [1])  # [M, 1]
        inside = g.And(
            g.GreaterOrEqual(m, self.start), g.LessOrEqual(m, g.Add(self.start, self.lens))
        )
        inside = g.And(inside, self.emits)  # [M, R]
        # Rows of nobody (padding, context logits) are given to request 0 and never read.
        self.request = g.ArgMax(g.int32(inside), axis=1, keepdims=0)  # [M]
        at = g.Sub(g.Squeeze(m, [1]), g.Gather(self.first, self.request))
        self.k = g.Max(g.Min(at, np.int32(block_size)), _ZERO)  # [M]
        self.slot = g.Gather("slots", self.request)  # [M]
        self._g = g
        if block_size:
            self.decode = g.Max(g.Sub(g.int32(self.request), g.int32(self.chunks)), _ZERO)  # [M]

    def parameter(self, name: str) -> str:
        """A sampling parameter [S] by row [M]."""
        return self._g.Gather(name, self.slot)

    def final_row(self, g: GraphWriter, accepted: str) -> str:
        """The row [R] that the token after the accepted drafts is drawn from."""
        return g.Add(self.first, accepted)

    def draft_rows(self, g: GraphWriter) -> str:
        """The row [B, G] that judges each draft; drafts not verified point at some row."""
        k = np.arange(self.block_size, dtype=np.int32)[None]
        rows = g.Add(g.Unsqueeze(g.slice_axis(self.first, self.chunks, _END, 0), [1]), k)
        return g.Min(rows, g.int32(g.Sub(g.dim("logits", 0), 1)))


def edited_logits(g: GraphWriter, rows: _Rows) -> str:
    """logits [M, V] with bias, penalties and bans of their request and prefix."""

    def some(name: str, neutral: float) -> str:
        values = g.Gather(name, "slots")
        off = g.Equal(values, np.float32(neutral))
        return g.Cast(g.ReduceMin(g.int32(off), keepdims=0), to=TensorProto.BOOL)

    def biased(sub: GraphWriter) -> list[str]:
        return [sub.Add("logits", sub.Gather("bias", rows.slot))]

    some_bias = g.Greater(g.ReduceMax(g.Gather("bias_on", "slots"), keepdims=0), _ZERO)
    logits = g.if_else(some_bias, biased, lambda sub: ["logits"], [TensorProto.FLOAT])[0]
    none = g.And(
        some("repetition_penalty", 1.0),
        g.And(some("presence_penalty", 0.0), some("frequency_penalty", 0.0)),
    )
    logits = g.if_else(
        none, lambda sub: [logits], lambda sub: [penalised(sub, rows, logits)], [TensorProto.FLOAT]
    )[0]

    def banned(sub: GraphWriter) -> list[str]:
        length = sub.Gather(rows.lens, "edit_seq")
        start = sub.Gather(rows.start, "edit_seq")
        real = sub.And(sub.LessOrEqual("edit_k", length), sub.GreaterOrEqual(start, _ZERO))
        row = sub.Where(real, sub.Add(start, "edit_k"), _ZERO)
        value = sub.Where(real, "edit_value", np.float32(0))
        where = sub.Concat(sub.Unsqueeze(row, [1]), sub.Unsqueeze("edit_id", [1]), axis=1)
        return [sub.ScatterND(logits, sub.int64(where), value, reduction="add")]

    some_edits = g.Greater(g.Squeeze(g.dim("edit_seq", 0), [0]), np.int64(0))
    return g.if_else(some_edits, banned, lambda sub: [logits], [TensorProto.FLOAT])[0]


def penalised(g: GraphWriter, rows: _Rows, logits: str) -> str:
    """The three penalties, each row counting its own draft prefix as output."""
    output = g.Gather("output_counts", rows.slot)  # [M, V]
    if rows.block_size:
        spare = np.zeros((1, rows.block_size), np.int32)  # for a step of chunks alone
        prefix = g.Gather(g.Concat("draft_tokens", spare, axis=0), rows.decode)  # [M, G]
        k = np.arange(rows.block_size, dtype=np.int32)[None]
        own = g.int32(g.Less(k, g.Unsqueeze(rows.k, [1])))
        output = g.ScatterElements(output, prefix, own, axis=1, reduction="add")
    prompt = g.Gather("prompt_counts", rows.slot)

    def column(name: str) -> str:
        return g.Unsqueeze(rows.parameter(name), [1])

    repetition = column("repetition_penalty")
    seen = g.Greater(g.Add(prompt, output), _ZERO)
    scaled = g.Where(
        g.Greater(logits, np.float32(0)), g.Div(logits, repetition), g.Mul(logits, repetition)
    )
    logits = g.Where(seen, scaled, logits)
    counted = g.Add(output, g.Mul(prompt, column("penalty_prompt")))
    present = g.Cast(g.Greater(counted, _ZERO), to=TensorProto.FLOAT)
    frequency = g.Mul(g.Cast(counted, to=TensorProto.FLOAT), column("frequency_penalty"))
    return g.Sub(logits, g.Add(g.Mul(present, column("presence_penalty")), frequency))


def target_law(g: GraphWriter, rows: _Rows, logits: str, best: str, hot: str) -> str:
    """p [M, V] f64: tempered and filtered, not normalised; one-hot where not `hot`."""
    law = tempered_law(g, logits, rows.parameter("temperature"))
    top_k, top_p, min_p = (rows.parameter(name) for name in ("top_k", "top_p", "min_p"))
    law = filtered_law(g, law, Filters.of(g, top_k, top_p, min_p, hot))
    total = g.ReduceSum(law, [1], keepdims=1)
    return g.Where(g.Unsqueeze(hot, [1]), g.Div(law, total), one_hot(g, best, "logits"))


def one_hot(g: GraphWriter, ids: str, like: str) -> str:
    """One-hot rows [len(ids), V] f64, V from the last axis of `like` [M, V]."""
    vocabulary = g.Unsqueeze(g.range(g.dim(like, 1)), [0])
    return g.Cast(g.Equal(vocabulary, g.Unsqueeze(ids, [1])), to=TensorProto.DOUBLE)


def drafted_law(g: GraphWriter, rows: _Rows) -> str:
    """q [B * G, V] f64 of every draft."""
    slots = g.slice_axis("slots", rows.chunks, _END, 0)
    temperature = g.Gather("draft_temperature", slots)
    temperature = g.Reshape(g.Expand(g.Unsqueeze(temperature, [1]), [1, rows.block_size]), [-1])
    flat = g.Reshape("draft_logits", g.Concat([-1], g.dim("draft_logits", 2), axis=0))
    law = tempered_law(g, flat, temperature)
    point = one_hot(g, g.Reshape("draft_tokens", [-1]), "logits")
    return g.Where(g.Unsqueeze(g.Greater(temperature, np.float32(0)), [1]), law, point)


def greedy_accepts(g: GraphWriter, rows: _Rows, best: str) -> str | None:
    """[B, G] bool: the draft is the argmax of the row that judges it."""
    if not rows.block_size:
        return None
    return g.Equal("draft_tokens", g.Gather(best, rows.draft_rows(g)))


def law_accepts(g: GraphWriter, rows: _Rows, law: str, draft_law: str) -> str:
    """[B, G] bool: u * q(x) < p(x)."""
    judge = g.Unsqueeze(g.Reshape(rows.draft_rows(g), [-1]), [1])
    token = g.Unsqueeze(g.Reshape("draft_tokens", [-1]), [1])
    p = g.GatherND(law, g.int64(g.Concat(judge, token, axis=1)))
    q = g.GatherElements(draft_law, token, axis=1)
    p = g.Reshape(p, g.Shape("draft_tokens"))
    q = g.Reshape(q, g.Shape("draft_tokens"))
    return g.Less(g.Mul(g.Cast("u_accept", to=TensorProto.DOUBLE), q), p)


def count_accepted(g: GraphWriter, rows: _Rows, accepts: str | None) -> str:
    """[R] int32: drafts accepted before the first rejection, at most l."""
    if accepts is None:
        return g.Mul(rows.lens, _ZERO)
    k = np.arange(1, rows.block_size + 1, dtype=np.int32)[None]
    good = g.And(accepts, g.LessOrEqual(k, g.Unsqueeze("lengths", [1])))
    failures = g.CumSum(g.int32(g.Not(good)), np.int64(1))
    accepted = g.ReduceSum(g.int32(g.Equal(failures, _ZERO)), [1], keepdims=0)
    return g.Concat(g.Mul("chunk_rows", _ZERO), accepted, axis=0)


def draw(g: GraphWriter, rows: _Rows, law: str, accepted: str, draft_law: str | None) -> str:
    """[R] int32: the token after the accepted drafts."""
    p = g.Gather(law, rows.final_row(g, accepted))  # [R, V]
    recover, bonus = g.op("Split", ["u_extra"], outputs=2, axis=1, num_outputs=2)
    u = g.Squeeze(bonus, [1])
    if draft_law is not None:
        rejected = g.Less(accepted, rows.lens)  # [R]
        decode = g.Sub(g.range(g.dim("slots", 0)), g.int32(rows.chunks))
        at = g.Add(g.Mul(decode, np.int32(rows.block_size)), accepted)
        q = g.Gather(draft_law, g.Where(rejected, at, _ZERO))
        zero = np.float64(0)
        residual = g.Max(g.Sub(p, q), zero)
        some = g.Greater(g.ReduceSum(residual, [1], keepdims=0), zero)
        # p = q to the last bit leaves no residual; a rejection then was rounding's.
        use = g.Unsqueeze(g.And(rejected, some), [1])
        p = g.Where(use, residual, p)
        u = g.Where(rejected, g.Squeeze(recover, [1]), u)
    return inverse_cdf(g, p, u)


def packed_output(
    g: GraphWriter, rows: _Rows, accepted: str, last: str, block_size: int
) -> list[str]:
    """OUTPUTS from the accepted counts [R] and the drawn tokens [R]."""
    n_out = g.Where(rows.emits, g.Add(accepted, _ONE), _ZERO)
    last = g.Where(rows.emits, last, np.int32(-1))
    if not block_size:
        return [g.Unsqueeze(last, [1]), n_out]
    j = np.arange(block_size + 1, dtype=np.int32)[None]
    count = g.Unsqueeze(accepted, [1])
    missing = g.Expand(np.int32(-1), g.Concat(rows.chunks, [block_size], axis=0))
    drafts = g.Concat(missing, "draft_tokens", axis=0)  # [R, G]
    spare = g.Expand(np.int32(-1), g.Concat(g.dim("slots", 0), [1], axis=0))
    drafts = g.Concat(drafts, spare, axis=1)
    out = g.Where(g.Less(j, count), drafts, np.int32(-1))
    return [g.Where(g.Equal(j, count), g.Unsqueeze(last, [1]), out), n_out]
