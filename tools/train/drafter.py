"""The draft model in torch, for training: all sampled blocks of all rows in one pass.

Parameters carry the names of DeepSpec's format, so the state dict is the checkpoint. The target's
embeddings and lm_head are not parameters: they are frozen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dspark_trt.build.config import DrafterDims, LayerDims
from dspark_trt.tools.train.attention import Mask, attend
from dspark_trt.tools.train.layer_math import rms_norm, rotate, swiglu

INIT_STD = 0.02


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Queries of the blocks on injected context keys and on the blocks' own."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.dims = dims
        e, d = dims.hidden_size, dims.head_dim
        self.q_proj = nn.Linear(e, dims.num_heads * d, bias=False)
        self.k_proj = nn.Linear(e, dims.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(e, dims.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(dims.num_heads * d, e, bias=False)
        self.q_norm = Norm(d, dims.rms_norm_eps)
        self.k_norm = Norm(d, dims.rms_norm_eps)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        """[B, N, H, D] of `x` [B, N, E]; `rope` [2, B, N, 1, D / 2]."""
        heads = self.q_proj(x).unflatten(-1, (-1, self.dims.head_dim))
        return rotate(self.q_norm(heads), rope[0], rope[1])

    def keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, KVH, D] each, of `x` [B, N, E]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.dims.head_dim))
        values = self.v_proj(x).unflatten(-1, (-1, self.dims.head_dim))
        return rotate(self.k_norm(keys), rope[0], rope[1]), values


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        e, inner = dims.hidden_size, dims.intermediate_size
        self.gate_proj = nn.Linear(e, inner, bias=False)
        self.up_proj = nn.Linear(e, inner, bias=False)
        self.down_proj = nn.Linear(inner, e, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer of Qwen3's class; the parts around the attention are compiled apart."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.input_layernorm = Norm(dims.hidden_size, dims.rms_norm_eps)
        self.self_attn = Attention(dims)
        self.post_attention_layernorm = Norm(dims.hidden_size, dims.rms_norm_eps)
        self.mlp = Mlp(dims)


def project(
    layer: Layer,
    context: Tensor,  # [B, T, E]
    x: Tensor,  # [B, A * G, E]
    context_rope: Tensor,
    block_rope: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q of the blocks; k and v of the context and then of the blocks."""
    normed = layer.input_layernorm(x)
    own = layer.self_attn.keys_values(normed, block_rope)
    seen = layer.self_attn.keys_values(context, context_rope)
    q = layer.self_attn.queries(normed, block_rope)
    k, v = torch.cat([seen[0], own[0]], dim=1), torch.cat([seen[1], own[1]], dim=1)
    return q.to(v.dtype), k.to(v.dtype), v


def finish(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    """The layer's output from its input and its attention's result."""
    x = x + layer.self_attn.o_proj(attended)
    return x + layer.mlp(layer.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """The latent vector of a slot, from the token before it: `bias_k = W2 latent_k`."""

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        e, r = dims.layer.hidden_size, dims.markov_rank
        self.kind = dims.markov_head_type
        self.markov_w1 = nn.Embedding(dims.vocab_size, r)
        self.markov_w2 = nn.Linear(r, dims.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(e + r, r)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + e, 3 * r)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[N, G, r] from the slots' hidden states [N, G, E] and W1 of the tokens before them."""
        if self.kind == "vanilla":
            return embedded
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
            return gate * embedded
        state, latents = torch.zeros_like(embedded[:, 0]), []
        for k in range(hidden.shape[1]):
            joint = self.joint_proj(torch.cat([state, embedded[:, k], hidden[:, k]], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            latents.append(torch.tanh(output))
        return torch.stack(latents, dim=1)


class ConfidenceHead(nn.Module):
    """The logit of c_k."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, feature: Tensor) -> Tensor:
        return self.proj(feature)[..., 0]


class Drafted(NamedTuple):
    """What the drafter makes of one batch; N = B * A blocks."""

    hidden: Tensor  # [N, G, E] h_k
    latent: Tensor | None  # [N, G, r]
    confidence: Tensor | None  # [N, G] logits


class Drafter(nn.Module):
    """A DSpark drafter."""

    def __init__(self, dims: DrafterDims) -> None:
        super().__init__()
        self.dims = dims
        layer = dims.layer
        e = layer.hidden_size
        self.fc = nn.Linear(len(dims.target_layer_ids) * e, e, bias=False)
        self.hidden_norm = Norm(e, layer.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(layer) for _ in range(dims.num_layers))
        self.norm = Norm(e, layer.rms_norm_eps)
        self.markov_head = MarkovHead(dims) if dims.markov_rank else None
        width = e + (dims.markov_rank if dims.confidence_head_with_markov else 0)
        self.confidence_head = ConfidenceHead(width) if dims.confidence_head else None
        self._project, self._finish = project, finish

    def compile_parts(self) -> None:
        """Compile what stands around the attention, once for all layers."""
        self._project = torch.compile(project, dynamic=False)
        self._finish = torch.compile(finish, dynamic=False)

    def forward(
        self,
        features: Tensor,  # [B, T, len(ids) * E]
        embedded: Tensor,  # [B, A, G, E]: the anchor's embedding, then the mask token's
        previous: Tensor,  # [B, A, G] int64: the token before each slot's
        rope: tuple[Tensor, Tensor],  # context [2, B, T, 1, D/2], blocks [2, B, A*G, 1, D/2]
        mask: Mask,
        *,
        detach_confidence: bool = False,
    ) -> Drafted:
        """Hidden states, the head's latents and confidence logits of every slot."""
        size = self.dims.block_size
        context = self.hidden_norm(self.fc(features))
        x = embedded.flatten(1, 2).float()
        for layer in self.layers:
            q, k, v = self._project(layer, context, x, rope[0], rope[1])
            x = self._finish(layer, x, attend(q, k, v, mask))
        hidden = self.norm(x).view(-1, size, x.shape[-1])
        if self.markov_head is None:
            return Drafted(hidden, None, self._confidence(hidden, None, detach_confidence))
        before = self.markov_head.markov_w1(previous.view(-1, size))
        latent = self.markov_head(hidden, before)
        return Drafted(hidden, latent, self._confidence(hidden, before, detach_confidence))

    def _confidence(self, hidden: Tensor, before: Tensor | None, detach: bool) -> Tensor | None:
        if self.confidence_head is None:
            return None
        feature = hidden if before is None else torch.cat([hidden, before], dim=-1)
        return self.confidence_head(feature.detach() if detach else feature)


@torch.no_grad()
def initialize(drafter: Drafter, embed: Tensor, final_norm: Tensor, *, seed: int) -> None:
    """Draw the drafter's weights.

    `norm` starts as the target's, since it feeds the target's lm_head. W1 starts as the principal
    components of the target's embeddings (so that like tokens start alike, rare ones too) and W2 as
    zero: training begins without a bias from the head.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith("norm.weight"):
            continue
        if name.startswith("confidence_head") or name.endswith(("bias", "markov_w2.weight")):
            parameter.zero_()
        elif name.endswith("markov_w1.weight"):
            parameter.copy_(_components(embed, parameter.shape[1], generator))
        else:
            parameter.copy_(INIT_STD * torch.randn(parameter.shape, generator=generator))
    drafter.norm.weight.copy_(final_norm)


def _components(embed: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """The first `rank` principal components of the rows of `embed`, of variance 1: [V, rank]."""
    centred = embed.float().cpu()
    centred = centred - centred.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))  # by rising variance
    parts = centred @ vectors.flip(1)[:, :rank]
    if parts.shape[1] < rank:  # a rank above the hidden size
        more = torch.randn(len(parts), rank - parts.shape[1], generator=generator)
        parts = torch.cat([parts, more], dim=1)
    return parts / parts.std(0).clamp(min=1e-6)
