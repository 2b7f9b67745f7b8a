"""Commit: a step's verdict into the per-slot state, in place.

A decoding request gains n_out tokens: its anchor and its accepted drafts are in the cache now, so
kv_len grows by n_out, and the last of its new tokens is the next anchor. A chunk's kv_len grows by
its rows; the last chunk of a prompt also gives the first anchor (n_out = 1). Tokens committed are
counted for the penalties.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx

from dspark_trt.plugins.graph import GraphWriter, make_function

INPUTS = (
    "slots",  # [R] int32
    "chunk_lens",  # [C] int32
    "out_tokens",  # [R, G + 1] int32, -1 past n_out
    "n_out",  # [R] int32
    "last_token",  # [S] int32 (state)
    "kv_len",  # [S] int32 (state)
    "output_counts",  # [S, V] int32 (state)
)
OUTPUTS = ("last_token_out", "kv_len_out", "output_counts_out")  # the state's own buffers


@cache
def commit() -> onnx.FunctionProto:
    """The operator; its body fits any dimensions."""

    def body(g: GraphWriter) -> list[str]:
        zero, one = np.int32(0), np.int32(1)
        decoding = g.slice_axis("n_out", g.dim("chunk_lens", 0), np.iinfo(np.int64).max, 0)
        grown = g.Concat("chunk_lens", decoding, axis=0)
        kv_len = g.Add(g.Gather("kv_len", "slots"), grown)

        last = g.Max(g.Sub("n_out", one), zero)
        newest = g.Squeeze(g.GatherElements("out_tokens", g.Unsqueeze(last, [1]), axis=1), [1])
        emitted = g.Greater("n_out", zero)
        newest = g.Where(emitted, newest, g.Gather("last_token", "slots"))

        cells = g.Transpose(g.NonZero(g.GreaterOrEqual("out_tokens", zero)), perm=[1, 0])  # [T, 2]
        tokens = g.GatherND("out_tokens", cells)
        slots = g.Gather("slots", g.Gather(cells, np.int64(0), axis=1))
        where = g.int64(g.Concat(g.Unsqueeze(slots, [1]), g.Unsqueeze(tokens, [1]), axis=1))
        ones = g.Expand(one, g.Shape(tokens))
        at = g.Unsqueeze(g.int64("slots"), [1])
        return [
            g.ScatterND("last_token", at, newest),
            g.ScatterND("kv_len", at, kv_len),
            g.ScatterND("output_counts", where, ones, reduction="add"),
        ]

    return make_function("Commit", INPUTS, OUTPUTS, body, overload="")
