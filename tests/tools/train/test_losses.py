"""The loss's terms against numbers worked out by hand and against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_trt.tools.train.losses import confidence_term, row_terms, vocabulary_terms


def test_terms_are_those_of_a_hand_computed_row() -> None:
    draft = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    target = torch.log(torch.tensor([[0.7, 0.2, 0.1]])) + 3.0  # a constant changes nothing
    rows = row_terms(draft, target, torch.tensor([1]), torch.tensor([2.0]), 0.1, 0.9)
    assert rows.ce.item() == pytest.approx(math.log(4), abs=1e-6)
    assert rows.l1.item() == pytest.approx(0.2 + 0.05 + 0.15, abs=1e-6)
    assert (rows.draft_top.item(), rows.target_top.item()) == (0, 0)
    # s = (-1, 1, 1), <s, p> = 0; CE's slope is p - onehot.
    slope = [-0.5, 0.25, 0.25]
    ce = [0.5, -0.75, 0.25]
    expected = [2 * (0.9 * a + 0.1 * b) for a, b in zip(slope, ce)]
    assert rows.gradient[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_confidence_is_a_binary_cross_entropy_with_a_detached_label() -> None:
    logits = torch.tensor([0.0, math.log(3.0)], requires_grad=True)
    label = torch.tensor([1.0, 0.5], requires_grad=True)
    loss = confidence_term(logits, label, torch.tensor([1.0, 2.0]))
    second = -0.5 * math.log(0.75) - 0.5 * math.log(0.25)
    assert loss.item() == pytest.approx(math.log(2) + 2 * second, abs=1e-6)
    loss.backward()
    assert label.grad is None
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([-0.5, 2 * 0.25], abs=1e-6)


def naive(
    hidden: torch.Tensor,
    latent: torch.Tensor | None,
    w2: torch.Tensor | None,
    *,
    head: torch.Tensor,
    target_hidden: torch.Tensor,
    label: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    logits = hidden @ head.T
    if latent is not None and w2 is not None:
        logits = logits + latent @ w2.T
    ce = torch.nn.functional.cross_entropy(logits, label, reduction="none")
    law = torch.softmax(target_hidden @ head.T, -1)
    l1 = (torch.softmax(logits, -1) - law).abs().sum(-1)
    return (weight * (0.1 * ce + 0.9 * l1)).sum()


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("chunk", [4, 100])
def test_value_and_gradients_are_autograds_whatever_the_chunk(rank: int, chunk: int) -> None:
    torch.manual_seed(0)
    count, width, vocab = 11, 6, 20
    hidden = torch.randn(count, width, requires_grad=True)
    latent = torch.randn(count, rank, requires_grad=True) if rank else None
    w2 = torch.randn(vocab, rank, requires_grad=True) if rank else None
    rest = {
        "head": torch.randn(vocab, width),
        "target_hidden": torch.randn(count, width),
        "label": torch.randint(0, vocab, (count,)),
        "weight": torch.rand(count),
    }
    leaves = [x for x in (hidden, latent, w2) if x is not None]
    found = vocabulary_terms(
        hidden, latent, w2, **rest, ce_weight=0.1, tv_weight=0.9, chunk=chunk
    ).total
    expected = naive(hidden, latent, w2, **rest)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    mine = torch.autograd.grad(2 * found, leaves)
    for a, b in zip(mine, torch.autograd.grad(2 * expected, leaves)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_without_counted_slots_the_loss_is_zero() -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    terms = vocabulary_terms(
        hidden,
        None,
        None,
        head=torch.randn(7, 3),
        target_hidden=torch.randn(4, 3),
        label=torch.zeros(4, dtype=torch.int64),
        weight=torch.zeros(4),
        ce_weight=0.1,
        tv_weight=0.9,
        chunk=2,
    )
    terms.total.backward()
    assert terms.total.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
