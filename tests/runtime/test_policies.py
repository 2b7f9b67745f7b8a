"""Whatever a policy asks for, the text stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine_driver import BLOCK, GREEDY, PROMPTS, plain, texts

from dspark_trt.runtime.budget import BudgetView, NoDraft, Policy, PolicyError, Static, Threshold
from dspark_trt.runtime.llm import LLM, SamplingParams


@dataclass
class Alternating:
    """Drafts on some steps only, as a policy that probes does."""

    name: str = "alternating"
    synchronous: bool = False
    max_length: int | None = None
    step: int = 0

    def budget(self, view: BudgetView) -> int:
        self.step += 1
        return 0 if self.step % 3 else int(view.room.sum())

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        raise AssertionError("not asked of this policy")


@dataclass
class Scripted(Alternating):
    """Budgets from a list, in turn: smaller and larger than the room, negative, numpy's."""

    budgets: tuple[Any, ...] = (3, 1, -2, 10**6, np.int64(2), 0, 5)

    def budget(self, view: BudgetView) -> int:
        self.step += 1
        return self.budgets[self.step % len(self.budgets)]


@dataclass
class Wild(Alternating):
    """A synchronous policy whose lengths leave the room on both sides."""

    synchronous: bool = True

    def budget(self, view: BudgetView) -> int:
        return int(view.room.sum())

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        self.step += 1
        return np.arange(len(room)) * 4 + self.step % 5 - 2


POLICIES: dict[str, Policy] = {
    "none": NoDraft(),
    "static": Static(),
    "static-1": Static(1),
    "static-3": Static(3),
    "static-beyond-the-block": Static(99),
    "threshold-0": Threshold(0.0),
    "threshold-half": Threshold(0.5),
    "threshold-1": Threshold(1.0),
    "alternating": Alternating(),
    "scripted": Scripted(),
    "wild": Wild(),
}


@pytest.fixture(scope="module")
def greedy_texts(shared_llm: LLM) -> list[list[int]]:
    return plain(shared_llm, PROMPTS, GREEDY)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_gives_the_same_greedy_text(
    llm: LLM, greedy_texts: list[list[int]], policy: Policy
) -> None:
    llm.engine.policy = policy
    done = llm.generate(PROMPTS, GREEDY)
    assert texts(done) == greedy_texts
    longest = min(policy.max_length or BLOCK, BLOCK)
    for completion in done:
        assert 1 + sum(completion.accepted_lengths) == len(completion.token_ids)
        assert max(completion.accepted_lengths_uncut) <= longest + 1


def test_no_draft_never_runs_the_draft_graph(llm: LLM) -> None:
    llm.engine.policy = NoDraft()
    done = llm.generate(PROMPTS[:2], GREEDY)
    assert llm.engine.metrics.draft_steps == llm.engine.metrics.drafted == 0
    assert {n for c in done for n in c.accepted_lengths} == {1}


def test_a_threshold_of_zero_is_static_and_of_one_verifies_hardly_anything(llm: LLM) -> None:
    lengths = []
    for policy in (Static(), Threshold(0.0)):
        llm.engine.policy = policy
        lengths.append([c.accepted_lengths for c in llm.generate(PROMPTS, GREEDY)])
    assert lengths[0] == lengths[1]
    llm.engine.metrics.reset()
    llm.engine.policy = Threshold(1.0)
    llm.generate(PROMPTS, GREEDY)
    metrics = llm.engine.metrics
    assert metrics.drafted > 0 and metrics.verified < 0.01 * metrics.drafted


def test_seeded_text_is_the_same_alone_and_in_company(llm: LLM) -> None:
    for policy in (NoDraft(), Static(), Threshold(0.5)):
        llm.engine.policy = policy
        params = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
        together = texts(llm.generate(PROMPTS, params))
        assert texts(llm.generate(PROMPTS[::-1], params)) == together[::-1]
        assert [texts(llm.generate([p], params))[0] for p in PROMPTS] == together


def test_drafts_never_change_what_a_request_without_them_samples(llm: LLM) -> None:
    """A policy may switch drafting off: the law of what follows stays, and nothing breaks."""
    llm.engine.policy = Alternating()
    params = SamplingParams(max_tokens=40, temperature=0.8, ignore_eos=True)
    done = llm.generate(PROMPTS, params)
    assert all(len(c.token_ids) == 40 for c in done)


@dataclass
class Watching(Alternating):
    """Drafts on two steps of three and keeps what each budget was shown."""

    views: list[BudgetView] = field(default_factory=list)

    def budget(self, view: BudgetView) -> int:
        self.views.append(view)
        self.step += 1
        return int(view.room.sum()) if self.step % 3 else 0


def test_a_budget_sees_only_confidences_that_are_two_steps_old(llm: LLM) -> None:
    policy = llm.engine.policy = Watching()
    llm.engine._conf_logits.clear()  # of earlier tests
    drafted: list[np.ndarray | None] = []  # confidence logits of each step that asked for a budget
    original = llm.executor.draft

    def draft(slots: np.ndarray, u_draft: np.ndarray) -> Any:
        drafts = original(slots, u_draft)
        drafted[-1] = drafts.conf_logits
        return drafts

    original_budget = policy.budget

    def budget(view: BudgetView) -> int:
        drafted.append(None)
        return original_budget(view)

    policy.budget = budget  # type: ignore[method-assign]
    llm.executor.draft = draft  # type: ignore[method-assign]
    try:
        llm.generate([PROMPTS[0]], GREEDY)
    finally:
        del llm.executor.draft
    assert len(policy.views) > 8
    for t, view in enumerate(policy.views):
        old = [conf for conf in drafted[: max(t - 1, 0)] if conf is not None]
        assert view.lagged_conf_logits is (old[-1] if old else None)
        assert view.sts is llm.executor.sts


@dataclass
class Scribbling(Alternating):
    """Writes into all that it is shown."""

    synchronous: bool = True

    def budget(self, view: BudgetView) -> int:
        budget = int(view.room.sum())
        view.room[:] = 99
        return budget

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        lengths = room.copy()
        conf[:], room[:] = 0, 99
        return lengths


def test_a_policy_cannot_write_into_the_engines_arrays(
    llm: LLM, greedy_texts: list[list[int]]
) -> None:
    llm.engine.policy = Scribbling()
    assert texts(llm.generate(PROMPTS, GREEDY)) == greedy_texts


def test_an_answer_of_a_wrong_kind_ends_in_an_error(llm: LLM) -> None:
    llm.engine.policy = Scripted(budgets=(float("nan"),))
    with pytest.raises(PolicyError, match="budget of policy 'alternating' must be an integer"):
        llm.generate(PROMPTS, GREEDY)
