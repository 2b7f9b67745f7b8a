"""The target ("verify") graph: packed rows of verification and prefill -> verdict, state committed.

Per step: C prefill chunks, then B decoding requests (R = C + B sequences), N packed rows, M rows
with logits: first those of the chunks that ask (each chunk's last row as a rule), then all rows of
the decoding requests. So N = chunk rows + B + K and M = asked chunk rows + B + K are known to the
host from K alone. Where a drafter is built in, its context K/V are this graph's tail: every row's
features go through fc, hidden_norm and the drafter's k/v projections into its pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from dspark_trt.build.config import DrafterDims, LayerDims, TargetDims
from dspark_trt.build.graph import ModelWriter
from dspark_trt.build.layers import LayerWriter, rope_tables
from dspark_trt.build.quantize import Quantizer
from dspark_trt.build.source import WeightSource
from dspark_trt.plugins.commit import commit
from dspark_trt.plugins.pack_verify import pack_verify
from dspark_trt.plugins.paged_kv_write import paged_kv_write
from dspark_trt.plugins.ragged_paged_attention import AttentionShape, ragged_paged_attention
from dspark_trt.plugins.ragged_verify import SAMPLING, ragged_verify

FLOAT = TensorProto.FLOAT
DRAFT_PREFIX = "draft."
LM_HEAD = "lm_head.weight"
EMBED = "embed_tokens.weight"
FLOAT_PARAMETERS = {
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "draft_temperature",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter to build in: its dimensions and where its weights come from."""

    dims: DrafterDims
    weights: WeightSource


@dataclass(slots=True)
class TargetGraph:
    """Writes the graph into `g`, top to bottom."""

    g: ModelWriter
    dims: TargetDims
    weights: WeightSource
    quantizer: Quantizer
    page_size: int
    drafter: Drafter | None

    def write(self) -> None:
        g, packed = self.g, self._pack()
        lengths, cu_seqlens, tokens, positions, pages, offsets, tables, kv_lens, requests = packed
        layers = LayerWriter(g, self.weights, self.dims.layer, "", self.quantizer)
        d = self.dims.layer
        cos_sin = rope_tables(g, d.rope, d.head_dim, positions)
        x = g.Gather(embedding(g, self.weights), tokens)
        taps = {-1: x}
        for i in range(self.dims.num_layers):
            h = layers.norm(x, f"layers.{i}.input_layernorm.weight")
            q, k, v = layers.qkv(h, i, cos_sin)
            cache = self._write_kv(f"kv.{i}", k, v, pages, offsets, d.num_kv_heads, d.head_dim)
            window = self.dims.sliding_windows[i]
            out = attention(
                g, d, [q, *cache, tables, cu_seqlens, kv_lens, requests],
                page_size=self.page_size, window=window,
            )  # fmt: skip
            x = layers.mlp(layers.attention_out(x, out, i), i)
            taps[i] = x
        if self.drafter is not None:
            self._inject(self.drafter, taps, positions, pages, offsets)
        rows = g.input("logit_rows", ["M"])
        h = layers.norm(g.Gather(x, rows), "norm.weight")
        logits = lm_head(g, self.dims, self.weights, self.quantizer, h)
        self._verdict(logits, lengths, cu_seqlens)
        g.output(logits, "logits", ["M", self.dims.vocab_size], FLOAT)
        g.output(lengths, "lengths", ["B"])

    def _pack(self) -> list[str]:
        g = self.g
        inputs = [
            g.input("tokens_in", ["N"]),
            g.input("slots", ["R"]),
            g.input("chunk_lens", ["C"]),
            g.input("last_token", ["S"]),
            g.input("kv_len", ["S"]),
            g.input("page_table", ["S", "max_pages"]),
        ]
        block = self.drafter.dims.block_size if self.drafter else 0
        if block:
            inputs += [
                g.input("draft_tokens", ["B", block]),
                g.input("conf_logits", ["B", block], FLOAT),
                g.input("sts", [block], FLOAT),
                g.input("caps", ["B"]),
                g.input("budget", [1], TensorProto.INT64),
            ]
        function = pack_verify(page_size=self.page_size, block_size=block)
        return g.call(function, inputs, page_size=self.page_size)

    def _write_kv(
        self, name: str, k: str, v: str, pages: str, offsets: str, heads: int, head_dim: int
    ) -> list[str]:
        """Pages of one layer after this step's rows; input and output are one buffer."""
        g = self.g
        dims: list[int | str] = ["P", self.page_size, heads, head_dim]
        inputs = [g.input(f"{name}.{part}", dims, FLOAT) for part in "kv"]
        results = g.call(paged_kv_write(), [*inputs, k, v, pages, offsets])
        for i, part in enumerate("kv"):
            g.output(results[i], f"{name}.{part}.out", dims, FLOAT)
        return [f"{name}.{part}.out" for part in "kv"]

    def _inject(
        self, drafter: Drafter, taps: dict[int, str], positions: str, pages: str, offsets: str
    ) -> None:
        """The drafter's context K/V of every row: hidden_norm(fc(features)) through its k, v."""
        g, d = self.g, drafter.dims.layer
        layers = LayerWriter(g, drafter.weights, d, DRAFT_PREFIX, self.quantizer)
        features = [taps[i] for i in drafter.dims.target_layer_ids]
        feature = features[0] if len(features) == 1 else g.Concat(*features, axis=1)
        context = layers.norm(layers.linear(feature, "fc"), "hidden_norm.weight")
        cos_sin = rope_tables(g, d.rope, d.head_dim, positions)
        for i in range(drafter.dims.num_layers):
            k, v = layers.context_kv(context, i, cos_sin)
            self._write_kv(f"draft_kv.{i}", k, v, pages, offsets, d.num_kv_heads, d.head_dim)

    def _verdict(self, logits: str, lengths: str, cu_seqlens: str) -> None:
        g, vocab = self.g, self.dims.vocab_size
        block = self.drafter.dims.block_size if self.drafter else 0
        chunk_rows = g.input("chunk_rows", ["C"])
        row_shift = g.Sub(g.dim("logit_rows", 0), g.dim("tokens_in", 0))
        inputs = [logits, "slots", chunk_rows, lengths, cu_seqlens, row_shift]
        inputs.append(g.input("u_extra", ["R", 2], FLOAT))
        inputs += [g.input(f"edit_{part}", ["Q"]) for part in ("seq", "k", "id")]
        inputs.append(g.input("edit_value", ["Q"], FLOAT))
        for name in SAMPLING:
            dtype = FLOAT if name in FLOAT_PARAMETERS else TensorProto.INT32
            inputs.append(g.input(name, ["S"], dtype))
        inputs += [g.input(f"{part}_counts", ["S", vocab]) for part in ("prompt", "output")]
        inputs.append(g.input("bias", ["S", vocab], FLOAT))
        if block:
            inputs += [
                g.input("u_accept", ["B", block], FLOAT),
                "draft_tokens",
                g.input("draft_logits", ["drafted", block, vocab], FLOAT),
                g.input("draft_temperature", ["S"], FLOAT),
            ]
        out_tokens, n_out = g.call(ragged_verify(block_size=block), inputs)
        state = g.call(
            commit(),
            ["slots", "chunk_lens", out_tokens, n_out, "last_token", "kv_len", "output_counts"],
        )
        g.output(out_tokens, "out_tokens", ["R", block + 1])
        g.output(n_out, "n_out", ["R"])
        for value, name in zip(state[:2], ("last_token", "kv_len"), strict=True):
            g.output(value, f"{name}.out", ["S"])
        g.output(state[2], "output_counts.out", ["S", vocab])


def attention(
    g: ModelWriter,
    dims: LayerDims,
    inputs: list[str],
    *,
    page_size: int,
    window: int = 0,
    block: bool = False,
) -> str:
    """A RaggedPagedAttention node -> [N, H, D]."""
    shape = AttentionShape(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        page_size=page_size,
        window=window,
        block=block,
    )
    function = ragged_paged_attention(shape)
    return g.call(function, inputs, scale=dims.head_dim**-0.5, window=window, block=int(block))[0]


def embedding(g: ModelWriter, weights: WeightSource) -> str:
    """The target's embedding table [V, E], kept in float32: a step reads a few of its rows."""
    if EMBED not in g.weights:
        g.weights.add(EMBED, weights.tensor(EMBED))
    return g.weight(EMBED)


def lm_head(
    g: ModelWriter, dims: TargetDims, weights: WeightSource, quantizer: Quantizer, x: str
) -> str:
    """Logits [N, V] of x [N, E].

    A tied head is stored a second time: the embedding table is mapped and read a few rows at a
    time, while a session keeps the head packed for its GEMM and drops the mapping.
    """
    source = EMBED if dims.tie_word_embeddings else LM_HEAD
    return quantizer.matmul(
        g,
        x,
        LM_HEAD,
        shape=(dims.vocab_size, dims.layer.hidden_size),
        load=lambda: weights.tensor(source),
    )
