"""top-k, top-p and min-p on laws: shared by the operators that draw from a target's law.

    top-k   the k likeliest ids, ties to the lowest ids
    top-p   of those, the fewest likeliest whose mass reaches top_p of theirs; at least one
    min-p   of those, the ones at least min_p times as likely as the likeliest

All three need the ids in order of probability, but seldom all of them: the SHORT likeliest are
sorted first, and the whole vocabulary only where some row keeps more. The result is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from dspark_trt.plugins.graph import GraphWriter

SHORT = 512

_ZERO = np.float64(0)
_DOUBLE = TensorProto.DOUBLE


@dataclass(frozen=True, slots=True)
class Filters:
    """Tensors by row: the parameters [M] and which rows they leave alone."""

    top_k: str  # int32, <= 0 = off
    top_p: str  # f32, >= 1 = off
    min_p: str  # f32, <= 0 = off
    no_k: str
    no_p: str
    off: str  # bool: nothing to filter

    @classmethod
    def of(cls, g: GraphWriter, top_k: str, top_p: str, min_p: str, hot: str) -> Filters:
        """`hot` [M] bool: rows whose law is read at all."""
        no_k = g.LessOrEqual(top_k, np.int32(0))
        no_p = g.GreaterOrEqual(top_p, np.float32(1))
        no_min = g.LessOrEqual(min_p, np.float32(0))
        off = g.Or(g.And(g.And(no_k, no_p), no_min), g.Not(hot))
        return cls(top_k, top_p, min_p, no_k, no_p, off)


def all_rows(g: GraphWriter, flags: str) -> str:
    """Whether every one of `flags` [M] bool is set: a bool scalar."""
    return g.Cast(g.ReduceMin(g.int32(flags), keepdims=0), to=TensorProto.BOOL)


def filtered_law(g: GraphWriter, law: str, filters: Filters) -> str:
    """`law` [M, V] f64, rows of sum 1, with what the filters drop at 0; not normalised again."""

    def sorted_part(sub: GraphWriter) -> list[str]:
        short = sub.Min(sub.dim(law, 1), np.array([SHORT]))
        value, index = sub.op("TopK", [law, short], outputs=2, axis=1, largest=1, sorted=1)
        enough = all_rows(sub, covered(sub, filters, value, short))

        def whole(inner: GraphWriter) -> list[str]:
            every = inner.op(
                "TopK", [law, inner.dim(law, 1)], outputs=2, axis=1, largest=1, sorted=1
            )
            return [kept(inner, law, filters, *every)]

        return sub.if_else(
            enough, lambda inner: [kept(inner, law, filters, value, index)], whole, [_DOUBLE]
        )

    return g.if_else(all_rows(g, filters.off), lambda sub: [law], sorted_part, [_DOUBLE])[0]


def covered(g: GraphWriter, filters: Filters, value: str, short: str) -> str:
    """[M] bool: nothing beyond the sorted values [M, short] passes, and nothing there counts."""
    by_k = g.And(g.Not(filters.no_k), g.LessOrEqual(filters.top_k, g.int32(short)))
    mass = g.ReduceSum(value, [1], keepdims=0)
    # A margin for the rounding of the sum.
    reach = g.Add(g.Cast(filters.top_p, to=_DOUBLE), np.float64(1e-9))
    by_p = g.And(g.Not(filters.no_p), g.Greater(mass, reach))
    first = g.Squeeze(g.slice_axis(value, 0, 1, 1), [1])
    last = g.Squeeze(g.slice_axis(value, -1, np.iinfo(np.int64).max, 1), [1])
    by_min = g.Less(last, g.Mul(g.Cast(filters.min_p, to=_DOUBLE), first))
    # A top-p after a longer top-k is of the mass of all k, which is not known here.
    whole_mass = g.Or(filters.no_k, filters.no_p)
    return g.Or(g.Or(by_k, filters.off), g.And(whole_mass, g.Or(by_p, by_min)))


def kept(g: GraphWriter, law: str, filters: Filters, value: str, index: str) -> str:
    """`law` with only what passes; value and index [M, n] are its likeliest ids, falling."""

    def column(name: str) -> str:
        return g.Unsqueeze(name, [1])

    rank = g.Unsqueeze(g.range(g.dim(value, 1)), [0])
    keep_k = g.Or(column(filters.no_k), g.Less(rank, column(filters.top_k)))
    value = g.Where(keep_k, value, _ZERO)
    # Without a top-k, top-p is of the whole law, whose sum is 1 also where `value` is a part.
    total = g.Where(column(filters.no_k), np.float64(1), g.ReduceSum(value, [1], keepdims=1))
    before = g.CumSum(value, np.int64(1), exclusive=1)
    reach = g.Mul(g.Cast(column(filters.top_p), to=_DOUBLE), total)
    value = g.Where(g.Or(column(filters.no_p), g.Less(before, reach)), value, _ZERO)
    largest = g.slice_axis(value, 0, 1, 1)
    floor = g.Mul(g.Cast(column(filters.min_p), to=_DOUBLE), largest)
    value = g.Where(g.GreaterOrEqual(value, floor), value, _ZERO)
    nothing = g.Expand(_ZERO, g.Shape(law))
    passed = g.ScatterElements(nothing, index, value, axis=1)
    return g.Where(column(filters.off), law, passed)
