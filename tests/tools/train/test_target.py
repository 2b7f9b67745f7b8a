"""The torch target against Transformers: packed rows, features, cached decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from factories import FAMILIES, load_target, tiny_target
from train_case import CPU

from dspark_trt.build.checkpoint import open_target
from dspark_trt.tools.train.generator import (
    Document,
    Generator,
    GeneratorLimits,
    Job,
    sample,
    sdpa_decode,
)
from dspark_trt.tools.train.target import TorchTarget

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def loaded(folder: Path, tokens: int = 64) -> TorchTarget:
    return TorchTarget(open_target(folder), CPU, max_tokens=tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_each_as_transformers_reads_them(family: str, tmp_path: Path) -> None:
    options = {"sliding_window": 8} if family == "mistral" else {}
    folder = tiny_target(tmp_path, family, layers=3, tie=family == "qwen2", **options)
    target, model = loaded(folder), load_target(folder)
    torch.manual_seed(0)
    lengths = (21, 7, 12)
    texts = [torch.randint(0, 256, (length,)) for length in lengths]
    tokens = torch.cat(texts)[None]
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    masks = target.masks(document, "sdpa")
    features, hidden = target.forward(tokens, positions, masks, (-1, 0, 1))
    logits = target.logits(hidden[0])
    at = 0
    for text in texts:
        with torch.no_grad():
            output = model(input_ids=text[None], output_hidden_states=True)
        expected = torch.cat([output.hidden_states[i][0] for i in (0, 1, 2)], dim=-1)
        part = slice(at, at + len(text))
        torch.testing.assert_close(features[0, part], expected, **TOLERANCE)
        torch.testing.assert_close(logits[part], output.logits[0].float(), **TOLERANCE)
        at += len(text)


def greedy(folder: Path, prompt: list[int], count: int, stops: set[int]) -> list[int]:
    """Greedy text by Transformers, one forward pass a token; the end token included."""
    model, ids = load_target(folder), list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generated_text_is_transformers_greedy_text_through_refilled_slots(
    family: str, tmp_path: Path
) -> None:
    folder = tiny_target(tmp_path, family, vocab=64, seed=3)
    target = loaded(folder, 48)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 64, n).tolist() for n in (3, 9, 5, 1, 7, 4, 6)]
    limits = GeneratorLimits(slots=2, document_tokens=24, answer_tokens=10, sync_every=4)
    generator = Generator(target, limits, stop_ids=[1, 5])
    jobs = iter([Job(tuple(prompt), 0.0) for prompt in prompts])
    found = {tuple(d.tokens[: d.answer_start]): d for d in generator.run(jobs)}
    assert len(found) == len(prompts)
    for prompt in prompts:
        document = found[tuple(prompt)]
        expected = greedy(folder, prompt, 10, {1, 5})
        assert document.tokens.tolist() == expected
        assert document.answer_start == len(prompt)


def test_a_user_turn_ends_in_its_bridge_and_an_answer_follows(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama", vocab=64, seed=5)
    limits = GeneratorLimits(
        slots=3, document_tokens=40, user_tokens=8, answer_tokens=12, bridge_tokens=4, sync_every=5
    )
    generator = Generator(loaded(folder, 48), limits, stop_ids=[1], turn_end=2, seed=1)
    bridge = (7, 2, 9)
    jobs = [Job((4, 5), 0.0, bridge=bridge, user_temperature=3.0) for _ in range(12)]
    documents = list(generator.run(iter(jobs)))
    assert len(documents) == 12
    users = set()
    for document in documents:
        ids, start = document.tokens.tolist(), document.answer_start
        assert ids[:2] == [4, 5]
        assert tuple(ids[start - 3 : start]) == bridge
        user = ids[2 : start - 3]
        users.add(tuple(user))
        assert len(user) <= 8 and 2 not in user
        answer = ids[start:]
        assert 1 <= len(answer) <= 12 and 1 not in answer[:-1]
        assert len(answer) == 12 or answer[-1] == 1
        assert document.temperature == 0.0
        assert ids == greedy(folder, ids[:start], len(answer), {1})
    assert len(users) > 6  # a high temperature writes different turns


def test_a_document_never_outgrows_its_slot(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama", vocab=64)
    limits = GeneratorLimits(slots=2, document_tokens=16, bridge_tokens=4, sync_every=3)
    generator = Generator(loaded(folder), limits, stop_ids=[], turn_end=63, seed=0)
    jobs = [Job((4, 5, 6), 1.0, bridge=(63, 3)), Job(tuple(range(14)), 1.0)]
    documents: list[Document] = list(generator.run(iter(jobs)))
    assert sorted(len(d.tokens) for d in documents) == [16, 16]
    assert all(d.answer_start < 16 for d in documents)


def test_samples_have_the_law_of_their_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0]])
    for temperature in (0.5, 1.0, 2.0):
        count = 20000
        drawn = sample(logits.expand(count, -1).contiguous(), torch.full((count,), temperature))
        law = torch.softmax(logits[0] / temperature, 0) * count
        found = torch.bincount(drawn, minlength=4).double()
        chi_square = ((found - law) ** 2 / law).sum().item()
        assert chi_square < 20  # three degrees of freedom: one in 6000 is above
    assert sample(logits, torch.zeros(1)).item() == 2


def test_decoding_reads_the_window_and_nothing_beyond_the_length() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 8), torch.randn(2, 12, 3, 8), torch.randn(2, 12, 3, 8)
    lengths = torch.tensor([5, 11])
    for window in (0, 4):
        found = sdpa_decode(q, k, v, lengths, window).view(2, 6, 8)
        for slot, length in enumerate(lengths.tolist()):
            first = max(0, length - window) if window else 0
            for head in range(6):
                keys, values = k[slot, first:length, head // 2], v[slot, first:length, head // 2]
                law = torch.softmax(keys @ q[slot, head] / 8**0.5, 0)
                torch.testing.assert_close(found[slot, head], law @ values, atol=1e-5, rtol=1e-5)
