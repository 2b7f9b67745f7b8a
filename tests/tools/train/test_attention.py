"""Who sees whom, by brute force, and the two ways to compute it."""

from __future__ import annotations

import warnings

import pytest
import torch

from dspark_trt.tools.train.attention import attend, block_rule, document_rule, mask_of

CPU = torch.device("cpu")
DOCUMENT = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0, 2, 2, 2]])


@pytest.mark.parametrize("window", [0, 2])
def test_target_sees_earlier_tokens_of_its_document(window: int) -> None:
    mask = mask_of(
        document_rule(DOCUMENT, window), attention="sdpa", batch=2, queries=10, keys=10, device=CPU
    )
    for b in range(2):
        for q in range(10):
            for kv in range(10):
                seen = kv <= q and DOCUMENT[b, q] == DOCUMENT[b, kv]
                seen = seen and (not window or q - kv < window)
                assert bool(mask[b, 0, q, kv]) == bool(seen), (b, q, kv)


def test_a_block_sees_context_before_its_anchor_and_itself() -> None:
    anchors, size = torch.tensor([[1, 5, 0], [0, 3, 8]]), 3
    mask = mask_of(
        block_rule(DOCUMENT, anchors, size),
        attention="sdpa",
        batch=2,
        queries=9,
        keys=19,
        device=CPU,
    )
    for b in range(2):
        for q in range(9):
            anchor = int(anchors[b, q // size])
            for kv in range(19):
                if kv < 10:
                    seen = kv < anchor and DOCUMENT[b, kv] == DOCUMENT[b, anchor]
                else:
                    seen = (kv - 10) // size == q // size
                assert bool(mask[b, 0, q, kv]) == bool(seen), (b, q, kv)


@torch.no_grad()
def test_flex_attention_computes_the_same_as_the_dense_mask() -> None:
    torch.manual_seed(0)
    document = torch.randint(0, 3, (2, 64)).sort(1)[0]
    anchors = torch.randint(0, 64, (2, 24)).sort(1)[0]
    q = torch.randn(2, 96, 4, 16)
    k, v = torch.randn(2, 160, 2, 16), torch.randn(2, 160, 2, 16)
    rule = block_rule(document, anchors, 4)
    results = []
    for attention in ("flex", "sdpa"):
        mask = mask_of(rule, attention=attention, batch=2, queries=96, keys=160, device=CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flex attention asks to be compiled
            results.append(attend(q, k, v, mask))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
