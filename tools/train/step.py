"""One forward pass of a batch: target (no gradient), drafter, and the loss's terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dspark_trt.tools.train.attention import block_rule, chosen, mask_of
from dspark_trt.tools.train.batches import Batch
from dspark_trt.tools.train.config import TrainConfig
from dspark_trt.tools.train.drafter import Drafted, Drafter
from dspark_trt.tools.train.layer_math import rope_table
from dspark_trt.tools.train.losses import (
    Rows,
    VocabularyTerms,
    confidence_term,
    row_terms,
    vocabulary_terms,
)
from dspark_trt.tools.train.target import TorchTarget


class StepTerms(NamedTuple):
    """Sums over the slots of one batch; divide by the step's sum of weights."""

    total: Tensor  # [] with gradient: the weighted loss
    parts: Tensor  # [4]: CE, L1, BCE (weighted by position), and slots where the argmaxes agree
    slots: VocabularyTerms  # of each counted slot
    confidence: Tensor | None  # [M] logits


class DraftStep(nn.Module):
    """The drafter with all that its loss needs; a module, so that DDP can wrap it."""

    def __init__(self, drafter: Drafter, target: TorchTarget, config: TrainConfig) -> None:
        super().__init__()
        self.drafter = drafter
        self.target = target
        self._config = config
        self._attention = chosen(config.attention, target.device)
        self._half = target.device.type == "cuda"
        layer = drafter.dims.layer
        longest = config.row_tokens + config.block_size
        self._rope = rope_table(layer.rope, layer.head_dim, longest, target.device)
        self._mask_embedding = target.embed[config.mask_token_id]  # [E]
        self._terms: Callable[..., Rows] = row_terms
        if config.compile and self._half:
            self._terms = torch.compile(row_terms, dynamic=False)
            drafter.compile_parts()

    def forward(self, batch: Batch) -> StepTerms:
        """The terms of one batch on the target's device."""
        config = self._config
        masks = self.target.masks(batch.document, self._attention)
        features, target_hidden = self.target.forward(
            batch.tokens, batch.positions, masks, config.feature_layers
        )
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self._half):
            drafted = self._draft(batch, features)
        head = self.drafter.markov_head
        latent = drafted.latent
        slots = vocabulary_terms(
            drafted.hidden.flatten(0, 1)[batch.slot],
            None if latent is None else latent.flatten(0, 1)[batch.slot],
            None if head is None else head.markov_w2.weight,
            head=self.target.lm_head,
            target_hidden=target_hidden.flatten(0, 1)[batch.source],
            label=batch.label,
            weight=batch.weight,
            ce_weight=config.ce_weight,
            tv_weight=config.tv_weight,
            chunk=config.vocabulary_chunk,
            terms=self._terms,
        )
        total, confidence = slots.total, None
        bce = torch.zeros((), device=total.device)
        if drafted.confidence is not None:
            confidence = drafted.confidence.reshape(-1)[batch.slot]
            bce = confidence_term(confidence, slots.acceptance, batch.weight)
            total = total + config.confidence_weight * bce
        agree = ((slots.draft_top == slots.target_top) & (batch.weight > 0)).sum()
        ce, l1 = (batch.weight * slots.ce).sum(), (batch.weight * slots.l1).sum()
        return StepTerms(total, torch.stack([ce, l1, bce.detach(), agree]), slots, confidence)

    def _draft(self, batch: Batch, features: Tensor) -> Drafted:
        size = self._config.block_size
        rows, count = batch.anchors.shape
        steps = torch.arange(size, device=batch.anchors.device)
        at = batch.anchors[..., None] + steps  # [B, A, G]
        inside = at.clamp(max=batch.tokens.shape[1] - 1).flatten(1)
        previous = batch.tokens.gather(1, inside).view(rows, count, size)
        embedded = self._mask_embedding.expand(rows, count, size, -1).clone()
        embedded[:, :, 0] = self.target.embed[previous[:, :, 0]]
        starts = batch.positions.gather(1, batch.anchors)  # [B, A]
        block_positions = (starts[..., None] + steps).flatten(1)
        mask = mask_of(
            block_rule(batch.document, batch.anchors, size),
            attention=self._attention,
            batch=rows,
            queries=count * size,
            keys=batch.tokens.shape[1] + count * size,
            device=batch.tokens.device,
        )
        drafted: Drafted = self.drafter(
            features,
            embedded,
            previous,
            (self._rope[:, batch.positions], self._rope[:, block_positions]),
            mask,
            detach_confidence=self._config.detach_confidence,
        )
        return drafted
