"""The one rule of equality for greedy text, and the oracle's side of it.

Two texts at temperature 0 are the same if their tokens are equal, or if the reference's two largest
logits at the first difference are closer than a stated gap: there rounding may choose. Every
difference is printed with its gap, so that a run with `-s` shows how many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch

FLOAT32_GAP = 1e-4


@dataclass(frozen=True)
class GreedyReference:
    """Greedy text of an oracle, and the logits that each of its tokens was chosen from."""

    ids: list[int]
    logits: np.ndarray  # [len(ids) or one more, V] f32: the last row is that of an end id

    def gap(self, position: int) -> float:
        """The top-2 gap of the logits that choose output token `position`."""
        return top2_gap(self.logits[position])


def top2_gap(logits: np.ndarray) -> float:
    """Largest minus second largest of one row [V]."""
    second, first = np.partition(np.asarray(logits, np.float64), -2)[-2:]
    return float(first - second)


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position where two texts differ (one may end there), None if they are equal."""
    for i, (a, b) in enumerate(zip(ours, reference)):
        if a != b:
            return i
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


def assert_same_greedy(
    ours: Sequence[int],
    reference_ids: Sequence[int],
    gap_of: Callable[[int], float],
    *,
    gap: float = FLOAT32_GAP,
    label: str = "",
) -> int | None:
    """Hold `ours` to the rule; gives the position of a tolerated difference, None if there is none.

    `gap_of(position)` is the top-2 gap of the reference's logits that choose output token
    `position`, after `reference_ids[:position]`. A text that ends earlier differs where it ends.
    """
    at = first_difference(ours, reference_ids)
    if at is None:
        return None
    found = gap_of(at)
    mine, theirs = list(ours[at : at + 1]), list(reference_ids[at : at + 1])
    message = (
        f"{label or 'greedy text'}: token {at} is {mine or 'absent'}, the reference has "
        f"{theirs or 'none'}; top-2 gap {found:.2e} (tolerated below {gap:.0e})"
    )
    print(message)
    assert found < gap, message
    return at


@torch.no_grad()
def reference_greedy(
    model: Any, prompt_ids: Sequence[int], count: int, end_ids: Sequence[int] = ()
) -> GreedyReference:
    """`count` greedy tokens of a Transformers model, fewer where one of `end_ids` is drawn.

    An end id is not among the tokens, but its row is the last of the logits.
    """
    ids: list[int] = []
    rows: list[np.ndarray] = []
    # Transformers 5.24 renamed the argument and the output's field.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    step, cache = torch.tensor([list(prompt_ids)]), None
    while len(ids) < count:
        output = model(input_ids=step, use_cache=True, logits_to_keep=1, **{name: cache})
        cache = output[name]
        rows.append(output.logits[0, -1].float().numpy())
        token = int(np.argmax(rows[-1]))  # the lowest id among equals
        if token in end_ids:
            break
        ids.append(token)
        step = torch.tensor([[token]])
    return GreedyReference(ids, np.stack(rows))


@torch.no_grad()
def reference_logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] f32 of a Transformers model over a whole text, in one pass."""
    return model(input_ids=torch.tensor([list(ids)])).logits[0].float().numpy()


def reference_along(
    model: Any,
    prompt_ids: Sequence[int],
    ours: Sequence[int],
    count: int,
    end_ids: Sequence[int] = (),
) -> GreedyReference:
    """The greedy text of `reference_greedy` as far as `ours` follows it, from one pass over `ours`.

    Its ids end with the first token that is not ours; after that the texts are two different ones.
    """
    logits = reference_logits(model, [*prompt_ids, *ours])[len(prompt_ids) - 1 :]
    ids: list[int] = []
    for i, row in enumerate(logits[:count]):
        token = int(row.argmax())
        if token in end_ids:
            break
        ids.append(token)
        if list(ours[i : i + 1]) != [token]:
            break
    return GreedyReference(ids, logits)


def assert_close_logits(ours: np.ndarray, reference: np.ndarray, *, bound: float) -> None:
    """Every logit [T, V] within `bound`; the message names the worst position."""
    assert ours.shape == reference.shape
    worst = np.abs(ours.astype(np.float64) - reference).max(axis=-1)
    at = int(worst.argmax())
    assert worst[at] <= bound, f"position {at} of {len(worst)}: logits differ by {worst[at]:.2e}"
