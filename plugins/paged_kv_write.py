"""PagedKvWrite: K and V of a ragged batch into their pages, in place.

    k_pages[pages[n], offsets[n]] = k[n]   for every row n with pages[n] >= 0; likewise v

Padding rows have page -1 and write nothing. Where v is NaN or infinite, 0 is written: attention
gives what a row does not see the weight 0, and 0 * NaN would carry one request's fault into
another's text.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx

from dspark_trt.plugins.graph import GraphWriter, make_function

INPUTS = (
    "k_pages",  # [P, page_size, KVH, D]
    "v_pages",  # [P, page_size, KVH, D]
    "k",  # [N, KVH, D]
    "v",  # [N, KVH, D]
    "pages",  # [N] int32, -1 = padding
    "offsets",  # [N] int32, in [0, page_size)
)
OUTPUTS = ("k_pages_out", "v_pages_out")  # the buffers of k_pages and v_pages


@cache
def paged_kv_write() -> onnx.FunctionProto:
    """The operator; its body fits any dimensions."""

    def body(g: GraphWriter) -> list[str]:
        rows = g.Reshape(g.NonZero(g.GreaterOrEqual("pages", np.int32(0))), [-1])
        where = g.int64(
            g.Concat(
                g.Unsqueeze(g.Gather("pages", rows), [1]),
                g.Unsqueeze(g.Gather("offsets", rows), [1]),
                axis=1,
            )
        )
        v = g.Gather("v", rows)
        finite = g.Where(g.Less(g.Abs(v), np.float32(np.inf)), v, np.float32(0))
        return [
            g.ScatterND("k_pages", where, g.Gather("k", rows)),
            g.ScatterND("v_pages", where, finite),
        ]

    return make_function("PagedKvWrite", INPUTS, OUTPUTS, body, overload="")
