"""The three terms of the loss, with the vocabulary-sized work in chunks.

For slot n with draft logits z = lm_head h + W2 latent, target logits y and label x:

    CE = logsumexp(z) - z[x],   L1 = || p - t ||_1   (p = softmax(z), t = softmax(y))
    d CE / dz = p - onehot(x),  d L1 / dz = p * (s - <s, p>)   with s = sign(p - t)

Gradients are taken where the logits are made, chunk by chunk, so that no chunk is computed twice
and none is kept: memory is that of one chunk of logits, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import binary_cross_entropy_with_logits

from dspark_trt.tools.train.layer_math import product32


class Rows(NamedTuple):
    """Of each row: the terms, both argmaxes, and the gradient of the weighted terms."""

    ce: Tensor  # [n]
    l1: Tensor  # [n]
    draft_top: Tensor  # [n] int64
    target_top: Tensor  # [n] int64
    gradient: Tensor  # [n, V]


def row_terms(
    draft: Tensor,  # [n, V] float32 logits
    target: Tensor,  # [n, V] float32 logits
    label: Tensor,  # [n] int64
    weight: Tensor,  # [n] float32
    ce_weight: float,
    tv_weight: float,
    dtype: torch.dtype = torch.float32,  # of the gradient
) -> Rows:
    """Terms and gradient of `weight * (ce_weight * CE + tv_weight * L1)`, row by row."""
    log_norm = torch.logsumexp(draft, dim=-1, keepdim=True)
    p = torch.exp(draft - log_norm)
    t = torch.softmax(target, dim=-1)
    ce = log_norm[:, 0] - draft.gather(1, label[:, None])[:, 0]
    difference = p - t
    sign = torch.sign(difference)
    slope = tv_weight * p * (sign - (p * sign).sum(-1, keepdim=True))
    hit = torch.arange(draft.shape[1], device=draft.device) == label[:, None]
    gradient = weight[:, None] * (slope + ce_weight * (p - hit.float()))
    l1 = difference.abs().sum(-1)
    return Rows(ce, l1, draft.argmax(-1), target.argmax(-1), gradient.to(dtype))


class _VocabularyLoss(Function):
    """`sum(weight * (ce_weight * CE + tv_weight * L1))` with gradients to h, latent and W2."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        hidden, latent, w2, head, target_hidden, label, weight, settings = arguments
        ce_weight, tv_weight, chunk, terms = settings
        weights = ce_weight, tv_weight
        inputs, both = hidden.to(head.dtype), head
        if latent is not None:
            inputs = torch.cat([inputs, latent.to(head.dtype)], dim=1)
            both = torch.cat([head, w2.to(head.dtype)], dim=1)
        to_inputs = torch.empty_like(inputs)
        to_w2 = None if latent is None else torch.zeros_like(w2, dtype=torch.float32)
        kept = []
        for start in range(0, len(inputs), chunk):
            part = slice(start, start + chunk)
            draft = product32(inputs[part], both)
            target = product32(target_hidden[part], head)
            rows = terms(draft, target, label[part], weight[part], *weights, head.dtype)
            gradient = rows.gradient
            torch.mm(gradient, both, out=to_inputs[part])
            if to_w2 is not None:
                to_w2 += product32(gradient.t(), inputs[part, hidden.shape[1] :].t())
            kept.append(rows[:4])
            del draft, target, rows, gradient
        ce, l1, draft_top, target_top = (torch.cat(parts) for parts in zip(*kept))
        ctx.save_for_backward(to_inputs, to_w2)
        ctx.width = hidden.shape[1]
        ctx.dtypes = hidden.dtype, None if latent is None else latent.dtype
        ctx.mark_non_differentiable(ce, l1, draft_top, target_top)
        total = (weight * (ce_weight * ce + tv_weight * l1)).sum()
        return total, ce, l1, draft_top, target_top

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        to_inputs, to_w2 = ctx.saved_tensors
        scale = outputs[0]
        to_hidden = (to_inputs[:, : ctx.width] * scale).to(ctx.dtypes[0])
        if to_w2 is None:
            return (to_hidden, *[None] * 7)
        to_latent = (to_inputs[:, ctx.width :] * scale).to(ctx.dtypes[1])
        return (to_hidden, to_latent, to_w2 * scale, *[None] * 5)


class VocabularyTerms(NamedTuple):
    """The weighted sum of CE and L1 over M slots, and the slots' own figures without gradient."""

    total: Tensor  # [] sum of weight * (ce_weight * CE + tv_weight * L1)
    ce: Tensor  # [M]
    l1: Tensor  # [M]
    draft_top: Tensor  # [M] int64: argmax of the draft
    target_top: Tensor  # [M] int64: argmax of the target

    @property
    def acceptance(self) -> Tensor:
        """1 - L1 / 2: the chance that a sampled draft is accepted: [M]."""
        return 1 - self.l1 / 2


def vocabulary_terms(
    hidden: Tensor,  # [M, E]
    latent: Tensor | None,  # [M, r]
    w2: Tensor | None,  # [V, r]
    *,
    head: Tensor,  # [V, E] frozen
    target_hidden: Tensor,  # [M, E]
    label: Tensor,  # [M] int64
    weight: Tensor,  # [M] float32
    ce_weight: float,
    tv_weight: float,
    chunk: int,
    terms: Callable[..., Rows] = row_terms,  # or the same, compiled
) -> VocabularyTerms:
    """CE and L1 of M slots against the target's law, at most `chunk` rows of logits at once."""
    settings = (ce_weight, tv_weight, chunk, terms)
    with torch.autocast(hidden.device.type, enabled=False):
        return VocabularyTerms(
            *_VocabularyLoss.apply(hidden, latent, w2, head, target_hidden, label, weight, settings)
        )


def confidence_term(logits: Tensor, acceptance: Tensor, weight: Tensor) -> Tensor:
    """sum of `weight * BCE(c, label)`, the label detached."""
    each = binary_cross_entropy_with_logits(
        logits.float(), acceptance.detach().clamp(0, 1), reduction="none"
    )
    return (weight * each).sum()
