"""SequentialHead: the drafts of a block, left to right.

    logits_k = U_k + bias_k;   x_k ~ softmax(logits_k / draft_temperature), or its argmax at 0

with x_0 the anchor, W1 [V, r] and W2 [V, r]:
    vanilla   bias_k = W2 . W1[x_{k-1}]
    gated     g = sigmoid(gate . [h_k ; W1[x_{k-1}]]),  bias_k = W2 . (g * W1[x_{k-1}])
    rnn       (gate, candidate, output) = joint . [s_{k-1} ; W1[x_{k-1}] ; h_k],  s_0 = 0
              s_k = sigmoid(gate) * s_{k-1} + (1 - sigmoid(gate)) * tanh(candidate)
              bias_k = W2 . tanh(output)
    none      bias_k = 0
and the confidence logit  c_k = w . [h_k ; W1[x_{k-1}]] + b,  or of h_k alone. Without a confidence
head c_k = +inf: every draft counts as certain.

A draw is the inverse CDF over ascending ids at u[b, k]; ties of an argmax go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto

from dspark_trt.plugins.graph import GraphWriter, make_function

OUTPUTS = (
    "tokens",  # [B, G] int32
    "logits",  # [B, G, V] f32: after the bias, before the temperature
    "conf_logits",  # [B, G] f32
)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Which head it is: static, so part of the operator's overload."""

    block_size: int  # G
    rank: int  # r, 0 = no sequential head
    kind: str  # vanilla | gated | rnn
    confidence: bool
    confidence_with_markov: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input names in order; weights only where this head has them."""
        names = [
            "base_logits",  # [B, G, V] f32
            "hidden",  # [B, G, E] f32: h_k
            "anchors",  # [B] int32: x_0
            "draft_temperature",  # [B] f32, 0 = argmax
            "u",  # [B, G] f32 in [0, 1)
        ]
        if self.rank:
            names += ["w1", "w2"]
            if self.kind == "gated":
                names += ["gate_weight", "gate_bias"]  # [r, E + r], [r]
            elif self.kind == "rnn":
                names += ["joint_weight", "joint_bias"]  # [3 r, 2 r + E], [3 r]
        if self.confidence:
            names += ["conf_weight", "conf_bias"]  # [1, E (+ r)], [1]
        return tuple(names)

    @property
    def overload(self) -> str:
        kind = self.kind if self.rank else "none"
        confidence = "none"
        if self.confidence:
            confidence = "markov" if self.confidence_with_markov else "plain"
        return f"{kind}r{self.rank}g{self.block_size}{confidence}"


@cache
def sequential_head(shape: HeadShape) -> onnx.FunctionProto:
    """The operator for one head: G steps, unrolled."""

    def body(g: GraphWriter) -> list[str]:
        previous, state = "anchors", ""
        if shape.kind == "rnn" and shape.rank:
            state = g.Expand(np.float32(0), g.Concat(g.dim("anchors", 0), [shape.rank], axis=0))
        columns: list[list[str]] = [[], [], []]
        for k in range(shape.block_size):
            index = np.int64(k)
            logits = g.Gather("base_logits", index, axis=1)  # [B, V]
            h = g.Gather("hidden", index, axis=1)  # [B, E]
            embedding = g.Gather("w1", previous) if shape.rank else ""  # [B, r]
            if shape.rank:
                feature, state = head_feature(g, shape, h, embedding, state)
                logits = g.Gemm(feature, "w2", logits, transB=1)
            conf = confidence_logit(g, shape, h, embedding)
            previous = draft_token(g, logits, g.Gather("u", index, axis=1))
            for column, value in zip(columns, (previous, logits, conf), strict=True):
                column.append(g.Unsqueeze(value, [1]))
        return [g.Concat(*column, axis=1) for column in columns]

    return make_function(
        "SequentialHead",
        shape.inputs,
        OUTPUTS,
        body,
        overload=shape.overload,
        attributes=("kind", "block_size"),
    )


def head_feature(
    g: GraphWriter, shape: HeadShape, h: str, embedding: str, state: str
) -> tuple[str, str]:
    """What W2 multiplies [B, r], and the RNN's next state [B, r] ("" for the other kinds)."""
    if shape.kind == "gated":
        gate = g.Gemm(g.Concat(h, embedding, axis=1), "gate_weight", "gate_bias", transB=1)
        return g.Mul(g.Sigmoid(gate), embedding), state
    if shape.kind == "rnn":
        x = g.Concat(state, embedding, h, axis=1)
        joint = g.Gemm(x, "joint_weight", "joint_bias", transB=1)
        gate, candidate, output = g.op("Split", [joint], outputs=3, axis=1, num_outputs=3)
        keep = g.Sigmoid(gate)
        fresh = g.Mul(g.Sub(np.float32(1), keep), g.Tanh(candidate))
        return g.Tanh(output), g.Add(g.Mul(keep, state), fresh)
    return embedding, state


def confidence_logit(g: GraphWriter, shape: HeadShape, h: str, embedding: str) -> str:
    """c_k [B] f32 before the sigmoid."""
    if not shape.confidence:
        return g.Expand(np.float32(np.inf), g.Shape("anchors"))
    x = g.Concat(h, embedding, axis=1) if shape.confidence_with_markov else h
    return g.Squeeze(g.Gemm(x, "conf_weight", "conf_bias", transB=1), [1])


def draft_token(g: GraphWriter, logits: str, u: str) -> str:
    """x_k [B] int32 from logits [B, V], at each row's `draft_temperature`."""
    best = g.int32(g.ArgMax(logits, axis=1, keepdims=0))
    hot = g.Greater("draft_temperature", np.float32(0))

    def drawn(sub: GraphWriter) -> list[str]:
        law = tempered_law(sub, logits, "draft_temperature")
        return [sub.Where(hot, inverse_cdf(sub, law, u), best)]

    some_hot = g.Greater(g.ReduceMax("draft_temperature", keepdims=0), np.float32(0))
    return g.if_else(some_hot, drawn, lambda sub: [best], [TensorProto.INT32])[0]


def tempered_law(g: GraphWriter, logits: str, temperature: str) -> str:
    """softmax(logits / temperature) [M, V] f64; a row of temperature 0 is a row nobody reads.

    In double no float32 logit over a temperature of 1e-9 overflows; Softmax takes the largest off.
    """
    cold = g.LessOrEqual(temperature, np.float32(0))
    divisor = g.Unsqueeze(g.Where(cold, np.float32(1), temperature), [1])
    double = TensorProto.DOUBLE
    return g.Softmax(g.Div(g.Cast(logits, to=double), g.Cast(divisor, to=double)), axis=1)


def inverse_cdf(g: GraphWriter, weights: str, u: str) -> str:
    """The least id [M] int32 whose cumulative weight exceeds u * total; weights [M, V] f64 >= 0.

    In double, u < 1 of 24 bits times the total stays below the total, so an id of weight 0 can
    never be the answer.
    """
    cumulative = g.CumSum(weights, np.int64(1))
    total = g.slice_axis(cumulative, -1, np.iinfo(np.int64).max, 1)  # [M, 1]
    threshold = g.Mul(g.Unsqueeze(g.Cast(u, to=TensorProto.DOUBLE), [1]), total)
    passed = g.int32(g.LessOrEqual(cumulative, threshold))
    return g.ReduceSum(passed, [1], keepdims=0)
