"""DSpark's draft model read straight from its checkpoint: plain torch, no cache, one block a call.

    feature_t = concat(hidden_states[i + 1] of the target at position t, for i in target_layer_ids)
    context_t = hidden_norm(fc(feature_t))                         for all t before the anchor
    block     = embed([anchor, mask, .., mask]) at positions start .. start + G - 1
    layer     : queries from the block; keys and values from [context ; block], no mask at all
    h_k       = norm(output of slot k);  U_k = lm_head(h_k)
    x_k       ~ softmax((U_k + bias_k(x_<k, h_k)) / temperature)
    c_k       = sigmoid(w . [h_k ; W1[x_{k-1}]] + b), or on h_k alone

Everything is recomputed from the token history on every call, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference.law import draft_law, inverse_cdf
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True)
class DraftBlock:
    """One drafted block."""

    tokens: list[int]  # x_1 .. x_G
    logits: Tensor  # [G, V] U_k + bias_k
    base_logits: Tensor  # [G, V] U_k
    conf_logits: Tensor | None  # [G] before the sigmoid; None without a confidence head
    hidden: Tensor  # [G, E] h_k


class ReferenceDrafter:
    """The drafter of a checkpoint directory, beside the Transformers model it was made for."""

    def __init__(self, drafter_dir: Path, hf_target: Any) -> None:
        self.config = json.loads((drafter_dir / "config.json").read_text(encoding="utf-8"))
        self.target = hf_target
        self.weights = _load_weights(drafter_dir)
        self.block_size = int(self.config["block_size"])
        embed, lm_head = hf_target.get_input_embeddings(), hf_target.get_output_embeddings()
        self.embed = self._own("embed_tokens.weight", embed.weight)
        self.lm_head = self._own("lm_head.weight", lm_head.weight)

    def _own(self, name: str, shared: Tensor) -> Tensor:
        """The drafter's tensor where its file has one, else the target's."""
        return self.weights[name] if name in self.weights else shared.detach().float()

    @torch.no_grad()
    def draft(
        self,
        ids: Sequence[int],
        *,
        temperature: float = 0.0,
        uniforms: Sequence[float] | None = None,
        block_size: int | None = None,
    ) -> DraftBlock:
        """Draft after the history `ids`, whose last token is the anchor.

        Temperature 0 takes the argmax; otherwise `uniforms` [G] are needed, one for each slot.
        `block_size` may be below the checkpoint's: a shorter block is drafted (fewer masks).
        """
        if temperature > 0 and uniforms is None:
            raise ValueError("drafting at a temperature above 0 needs uniforms")
        size = block_size or self.block_size
        hidden = self.block_hidden(ids, size)
        base = linear(hidden, self.lm_head)
        head = _SequentialHead(self.config, self.weights)
        tokens: list[int] = []
        logits, confidences = [], []
        previous = ids[-1]
        for k in range(size):
            step = base[k] + head.bias(previous, hidden[k])
            law = draft_law(step.double().numpy(), temperature)
            confidences.append(self._confidence(previous, hidden[k]))
            logits.append(step)
            previous = inverse_cdf(law, uniforms[k] if uniforms is not None else 0.0)
            tokens.append(previous)
        known = [c for c in confidences if c is not None]
        return DraftBlock(
            tokens=tokens,
            logits=torch.stack(logits),
            base_logits=base,
            conf_logits=torch.stack(known) if known else None,
            hidden=hidden,
        )

    @torch.no_grad()
    def context(self, ids: Sequence[int]) -> Tensor:
        """hidden_norm(fc(features)) of every position of `ids`: [T, E]."""
        output = self.target(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
        layers = [output.hidden_states[i + 1][0].float() for i in self.config["target_layer_ids"]]
        projected = linear(torch.cat(layers, dim=-1), self.weights["fc.weight"])
        return self._norm(projected, "hidden_norm")

    def context_kv(self, context: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Injected keys (normed, rotated) and values of positions 0 .. T-1: [T, KVH, D] each."""
        positions = torch.arange(len(context))
        return self._keys(context, positions, layer), self._heads(context, layer, "v_proj")

    @torch.no_grad()
    def block_hidden(self, ids: Sequence[int], size: int) -> Tensor:
        """h_1 .. h_G after the history `ids` (anchor last): [G, E]."""
        start = len(ids) - 1  # the anchor's position; the context is 0 .. start - 1
        width = self.config["hidden_size"]
        context = self.context(ids[:start]) if start else torch.zeros(0, width)
        block_ids = [ids[-1]] + [self.config["mask_token_id"]] * (size - 1)
        x = self.embed[torch.tensor(block_ids)]
        positions = torch.arange(start, start + size)
        for layer in range(self.config["num_hidden_layers"]):
            normed = self._norm(x, f"layers.{layer}.input_layernorm")
            x = x + self._attention(normed, positions, context, layer)
            normed = self._norm(x, f"layers.{layer}.post_attention_layernorm")
            x = x + self._mlp(normed, layer)
        return self._norm(x, "norm")

    def _attention(self, x: Tensor, positions: Tensor, context: Tensor, layer: int) -> Tensor:
        context_keys, context_values = self.context_kv(context, layer)
        keys = torch.cat([context_keys, self._keys(x, positions, layer)])
        values = torch.cat([context_values, self._heads(x, layer, "v_proj")])
        queries = self._heads(x, layer, "q_proj")
        queries = self._norm(queries, f"layers.{layer}.self_attn.q_norm")
        queries = self._rotate(queries, positions)
        group = queries.shape[1] // keys.shape[1]
        outputs = []
        for head in range(queries.shape[1]):
            k, v = keys[:, head // group], values[:, head // group]  # [T + G, D]
            scores = queries[:, head] @ k.T / self.config["head_dim"] ** 0.5
            outputs.append(torch.softmax(scores, dim=-1) @ v)
        return self._linear(torch.cat(outputs, dim=-1), f"layers.{layer}.self_attn.o_proj")

    def _keys(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        keys = self._heads(x, layer, "k_proj")
        return self._rotate(self._norm(keys, f"layers.{layer}.self_attn.k_norm"), positions)

    def _heads(self, x: Tensor, layer: int, projection: str) -> Tensor:
        """Project [T, E] and split into heads: [T, heads, D]."""
        flat = self._linear(x, f"layers.{layer}.self_attn.{projection}")
        dim = self.config["head_dim"]
        return flat.view(len(x), flat.shape[-1] // dim, dim)

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        prefix = f"layers.{layer}.mlp"
        gate, up = self._linear(x, f"{prefix}.gate_proj"), self._linear(x, f"{prefix}.up_proj")
        return self._linear(silu(gate) * up, f"{prefix}.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        scale = torch.rsqrt(mean_square + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on [T, heads, D]: dimension j turns with dimension j + D/2."""
        half = self.config["head_dim"] // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        angles = positions.double()[:, None] / _rope_theta(self.config) ** exponents[None]
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _confidence(self, previous: int, hidden: Tensor) -> Tensor | None:
        if not self.config["enable_confidence_head"]:
            return None
        feature = hidden
        if self.config["confidence_head_with_markov"]:
            w1 = self.weights["markov_head.markov_w1.weight"]
            feature = torch.cat([hidden, w1[previous]])
        return self._linear(feature, "confidence_head.proj")[0]


class _SequentialHead:
    """bias_k from the previous token and h_k; the rnn head carries a state through one block."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.rank = int(config["markov_rank"])
        self.kind = config["markov_head_type"] if self.rank else "none"
        self.state = torch.zeros(self.rank)
        self.parts = {
            key.removeprefix("markov_head."): value
            for key, value in weights.items()
            if key.startswith("markov_head.")
        }

    def bias(self, previous: int, hidden: Tensor) -> Tensor:
        """bias_k [V]; call once a slot, left to right."""
        if self.kind == "none":
            return torch.zeros(())
        embedded = self.parts["markov_w1.weight"][previous]
        return self.parts["markov_w2.weight"] @ self._latent(embedded, hidden)

    def _latent(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        if self.kind == "vanilla":
            return embedded
        if self.kind == "gated":
            gate = torch.sigmoid(self._project("gate_proj", torch.cat([hidden, embedded])))
            return gate * embedded
        if self.kind == "rnn":
            joint = self._project("joint_proj", torch.cat([self.state, embedded, hidden]))
            gate, candidate, output = joint.split(self.rank)
            keep = torch.sigmoid(gate)
            self.state = keep * self.state + (1 - keep) * torch.tanh(candidate)
            return torch.tanh(output)
        raise ValueError(f"markov_head_type must be vanilla, gated or rnn, got {self.kind!r}")

    def _project(self, name: str, x: Tensor) -> Tensor:
        return self.parts[f"{name}.weight"] @ x + self.parts[f"{name}.bias"]


def _load_weights(drafter_dir: Path) -> dict[str, Tensor]:
    """All tensors in float32; `markov_w1` and `markov_w2` may be named without `.weight`."""
    weights: dict[str, Tensor] = {}
    for path in sorted(drafter_dir.glob("*.safetensors")):
        for key, value in load_file(path).items():
            bare = key in ("markov_head.markov_w1", "markov_head.markov_w2")
            weights[f"{key}.weight" if bare else key] = value.float()
    return weights


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"the reference reads unscaled RoPE only, got rope_type {kind!r}")
    return float(parameters["rope_theta"] if "rope_theta" in parameters else config["rope_theta"])
