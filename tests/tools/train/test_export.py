"""What a run writes is what it trained: every head, both formats, read back by other code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories import load_target, tiny_target
from reference.drafter import ReferenceDrafter
from train_case import Case, make_case, random_corpus

from dspark_trt.build.checkpoint import open_drafter
from dspark_trt.tools.train.batches import make_batch
from dspark_trt.tools.train.corpus import Corpus
from dspark_trt.tools.train.export import save_drafter


def trained_logits(case: Case, corpus: Corpus, anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits [G, V] and confidence logits [G] of one block in the trainer's own pass."""
    kept: list[torch.Tensor] = []
    terms = case.step._terms

    def keep(draft: torch.Tensor, *rest: object) -> object:
        kept.append(draft)
        return terms(draft, *rest)  # type: ignore[arg-type]

    case.step._terms = keep  # type: ignore[assignment]
    picks = [[torch.tensor([anchor]).numpy()]]
    found = case.step(make_batch(corpus, [[0]], picks, case.config))
    size = case.config.block_size
    assert found.confidence is not None
    return kept[0][:size], found.confidence[:size]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_the_written_drafter_gives_the_trainers_logits(
    family: str, head: str, tmp_path: Path
) -> None:
    folder = tiny_target(tmp_path, family, layers=3, tie=family == "qwen2")
    case = make_case(folder, noise=0.1, head=head)
    corpus = random_corpus(tmp_path / "data", 256, [30])
    written = tmp_path / "drafter"
    save_drafter(written, case.drafter, case.checkpoint.dims, anchors=16, dtype="float32")
    dims = open_drafter(written, case.checkpoint.dims).dims
    assert dims == case.drafter.dims
    assert dims.block_size == 4 and dims.mask_token_id == 255
    reference = ReferenceDrafter(written, load_target(folder))
    text, anchor = corpus.document(0).tolist(), 11
    logits, confidence = trained_logits(case, corpus, anchor)
    hidden = reference.block_hidden(text[: anchor + 1], 4)
    from reference.drafter import _SequentialHead

    sequential = _SequentialHead(reference.config, reference.weights)
    for k in range(4):
        previous = text[anchor + k]
        expected = hidden[k] @ reference.lm_head.T + sequential.bias(previous, hidden[k])
        torch.testing.assert_close(logits[k], expected, atol=2e-4, rtol=2e-4)
        sure = reference._confidence(previous, hidden[k])
        assert sure is not None
        torch.testing.assert_close(confidence[k], sure, atol=2e-4, rtol=2e-4)


def test_eight_bits_are_near_the_trained_weights(tmp_path: Path) -> None:
    case = make_case(tiny_target(tmp_path, "llama"), noise=0.1)
    written = tmp_path / "small"
    save_drafter(written, case.drafter, case.checkpoint.dims, anchors=16, int8=True)
    found = open_drafter(written, case.checkpoint.dims)
    assert found.weight_dtype == "int8"
    state = case.drafter.state_dict()
    assert set(found.weights.names()) == set(state)
    for name, value in state.items():
        error = (torch.from_numpy(found.weights.tensor(name)) - value).abs()
        bound = value.abs().amax(-1, keepdim=True) / 254 if value.ndim == 2 else 0.0
        assert (error <= bound + 1e-7).all(), name
