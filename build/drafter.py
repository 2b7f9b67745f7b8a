"""The draft graph: slots -> a block of drafts with logits and confidences.

It depends on `slots` [B] alone (and on uniforms where drafts are sampled): anchors, positions and
pages come from the per-slot state. The block attends to the injected context in the drafter's pages
and to itself in both directions; its own K/V are never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from dspark_trt.build.config import TargetDims
from dspark_trt.build.graph import ModelWriter
from dspark_trt.build.layers import LayerWriter, rope_tables
from dspark_trt.build.quantize import Quantizer
from dspark_trt.build.source import WeightSource
from dspark_trt.build.target import (
    DRAFT_PREFIX,
    EMBED,
    LM_HEAD,
    Drafter,
    attention,
    embedding,
    lm_head,
)
from dspark_trt.plugins.sequential_head import HeadShape, sequential_head

FLOAT = TensorProto.FLOAT


@dataclass(slots=True)
class DraftGraph:
    """Writes the graph into `g`, top to bottom."""

    g: ModelWriter
    drafter: Drafter
    target: TargetDims
    target_weights: WeightSource
    quantizer: Quantizer
    page_size: int

    def write(self) -> None:
        g, dims = self.g, self.drafter.dims
        slots = g.input("slots", ["B"])
        anchors = g.Gather(g.input("last_token", ["S"]), slots)  # [B]
        start = g.Gather(g.input("kv_len", ["S"]), slots)  # [B] context lengths
        tables = g.Gather(g.input("page_table", ["S", "max_pages"]), slots)
        hidden = self._backbone(anchors, start, tables)  # [B * G, E]
        logits = self._base_logits(hidden)
        block, vocab = dims.block_size, dims.vocab_size
        inputs = [
            g.Reshape(logits, [-1, block, vocab]),
            g.Reshape(hidden, [-1, block, dims.layer.hidden_size]),
            anchors,
            g.Gather(g.input("draft_temperature", ["S"], FLOAT), slots),
            g.input("u_draft", ["B", block], FLOAT),
            *self._head_weights(),
        ]
        shape = HeadShape(
            block_size=block,
            rank=dims.markov_rank,
            kind=dims.markov_head_type,
            confidence=dims.confidence_head,
            confidence_with_markov=dims.confidence_head_with_markov,
        )
        results = g.call(
            sequential_head(shape), inputs, kind=shape.kind, block_size=shape.block_size
        )
        g.output(results[0], "draft_tokens", ["B", block])
        g.output(results[1], "draft_logits", ["B", block, vocab], FLOAT)
        g.output(results[2], "conf_logits", ["B", block], FLOAT)

    def _backbone(self, anchors: str, start: str, tables: str) -> str:
        """h of every slot of the block, [B * G, E]."""
        g, dims = self.g, self.drafter.dims
        d, block = dims.layer, dims.block_size
        layers = LayerWriter(g, self.drafter.weights, d, DRAFT_PREFIX, self.quantizer)
        masks = g.Expand(
            np.int32(dims.mask_token_id), g.Concat(g.dim(anchors, 0), [block - 1], axis=0)
        )
        tokens = g.Reshape(g.Concat(g.Unsqueeze(anchors, [1]), masks, axis=1), [-1])
        within = np.arange(block, dtype=np.int32)[None]
        positions = g.Reshape(g.Add(g.Unsqueeze(start, [1]), within), [-1])
        count = g.Add(g.dim(anchors, 0), 1)
        cu_seqlens = g.Mul(g.range(count), np.int32(block))
        cos_sin = rope_tables(g, d.rope, d.head_dim, positions)
        row = g.range(g.dim(tokens, 0))
        requests = g.Div(row, np.int32(block))
        x = g.Gather(self._embedding(), tokens)
        for i in range(dims.num_layers):
            h = layers.norm(x, f"layers.{i}.input_layernorm.weight")
            q, k, v = layers.qkv(h, i, cos_sin)
            shape: list[int | str] = ["P", self.page_size, d.num_kv_heads, d.head_dim]
            pages = [g.input(f"draft_kv.{i}.{part}", shape, FLOAT) for part in "kv"]
            out = attention(
                g, d, [q, *pages, tables, cu_seqlens, start, requests, k, v],
                page_size=self.page_size, block=True,
            )  # fmt: skip
            x = layers.mlp(layers.attention_out(x, out, i), i)
        return layers.norm(x, "norm.weight")

    def _embedding(self) -> str:
        if self.drafter.dims.own_embed_tokens:
            return self.g.weight(DRAFT_PREFIX + EMBED, self.drafter.weights.tensor(EMBED))
        return embedding(self.g, self.target_weights)

    def _base_logits(self, hidden: str) -> str:
        """U_k of every slot, [B * G, V]."""
        dims, weights = self.drafter.dims, self.drafter.weights
        if not dims.own_lm_head:
            return lm_head(self.g, self.target, self.target_weights, self.quantizer, hidden)
        return self.quantizer.matmul(
            self.g,
            hidden,
            DRAFT_PREFIX + LM_HEAD,
            shape=(dims.vocab_size, dims.layer.hidden_size),
            load=lambda: weights.tensor(LM_HEAD),
        )

    def _head_weights(self) -> list[str]:
        """Weights of the sequential and confidence heads, in HeadShape.inputs' order."""
        dims = self.drafter.dims
        names = []
        if dims.markov_rank:
            names += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
            extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(dims.markov_head_type)
            if extra:
                names += [f"markov_head.{extra}.weight", f"markov_head.{extra}.bias"]
        if dims.confidence_head:
            names += ["confidence_head.proj.weight", "confidence_head.proj.bias"]
        return [self.g.weight(DRAFT_PREFIX + n, self.drafter.weights.tensor(n)) for n in names]
