"""What was measured, as a table, ratios, a comparison of the texts and a plot.

A ratio is taken round by round, both sides of the same round, and given as the median; the spread
is the smallest and the largest round.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dspark_trt.tools.bench_runs import Answer, ArmResult, Sample
from dspark_trt.tools.extras import load_extra

PLAIN = "no drafts"
OURS = "engine"
SHOWN_CHARACTERS = 30


def decode_rate(sample: Sample) -> float:
    """Decode tokens a second, over all requests of the batch."""
    return _over(sample.decode_tokens, sample.decode_seconds)


def prefill_rate(sample: Sample) -> float:
    """Prompt tokens a second."""
    return _over(sample.prefill_tokens, sample.prefill_seconds)


# Name in the JSON -> its value from one sample.
FIGURES: dict[str, Callable[[Sample], float]] = {
    "prefill_tokens_per_s": prefill_rate,
    "decode_tokens_per_s": decode_rate,
    "draft_ms_per_step": lambda s: 1e3 * _over(s.draft_seconds, s.draft_steps),
    "verify_ms_per_step": lambda s: 1e3 * _over(s.verify_seconds, s.decode_steps),
    "host_share": lambda s: _over(s.host_seconds, s.decode_seconds),
    "requests_per_step": lambda s: _over(s.request_steps, s.decode_steps),
    "mean_accepted_length": lambda s: s.mean_accepted_length,
}


def _over(a: float, b: float) -> float:
    return a / b if b else 0.0


def figures(result: ArmResult) -> dict[str, dict[str, float]]:
    """Median, smallest and largest of each figure over the rounds."""
    table = {}
    for name, of in FIGURES.items():
        values = [of(sample) for sample in result.samples]
        table[name] = {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
    return table


def accepted_by_position(result: ArmResult) -> list[float]:
    """Of the drafts verified at position k, the share accepted with all before them."""
    verified = [sum(v) for v in zip(*(s.verified_by_position for s in result.samples))]
    accepted = [sum(v) for v in zip(*(s.accepted_by_position for s in result.samples))]
    return [_over(a, v) for a, v in zip(accepted, verified)]


def ratio(ours: ArmResult, base: ArmResult) -> dict[str, Any]:
    """Decode speed of `ours` over that of `base`, round by round."""
    rounds = [_over(decode_rate(a), decode_rate(b)) for a, b in zip(ours.samples, base.samples)]
    return {
        "of": label(ours),
        "over": label(base),
        "median": statistics.median(rounds),
        "min": min(rounds),
        "max": max(rounds),
    }


def ratios(results: Sequence[ArmResult], peers: Iterable[str]) -> list[dict[str, Any]]:
    """Drafts over none at each batch size, ours over each peer, and plain batches over the
    smallest."""
    names = set(peers)
    ours = [r for r in results if r.name not in names]
    plain = {r.batch_size: r for r in ours if r.name == PLAIN}
    pairs = [(r, plain[r.batch_size]) for r in ours if r.name != PLAIN]
    pairs += [(r, base) for base in results if base.name in names for r in ours]
    smallest = plain[min(plain)]
    pairs += [(r, smallest) for r in plain.values() if r is not smallest]
    return [ratio(a, b) for a, b in pairs if a.batch_size == b.batch_size or b is smallest]


def agreement(reference: ArmResult, other: ArmResult, lines: Sequence[int]) -> dict[str, Any]:
    """How many greedy answers are equal, and where the first one that is not differs.

    Token ids are compared where both sides give them, text otherwise; `lines` are the prompts'.
    """
    first, equal = None, 0
    for line, a, b in zip(lines, reference.answers, other.answers):
        at = difference(a, b)
        equal += at is None
        if at is not None and first is None:
            unit = "character" if None in (a.token_ids, b.token_ids) else "token"
            first = {"line": line, unit: at, "texts": [_around(a, b), _around(b, a)]}
    return {
        "of": label(other),
        "with": label(reference),
        "equal": equal,
        "prompts": len(reference.answers),
        "first_difference": first,
    }


def difference(a: Answer, b: Answer) -> int | None:
    """The first token (or character) at which two answers differ, None if they are equal."""
    xs: Sequence[Any] = a.text
    ys: Sequence[Any] = b.text
    if a.token_ids is not None and b.token_ids is not None:
        xs, ys = a.token_ids, b.token_ids
    for i, (x, y) in enumerate(zip(xs, ys)):
        if x != y:
            return i
    return None if len(xs) == len(ys) else min(len(xs), len(ys))


def _around(a: Answer, b: Answer) -> str:
    """The text of `a` from just before it leaves that of `b`."""
    same = next(
        (i for i, (x, y) in enumerate(zip(a.text, b.text)) if x != y),
        min(len(a.text), len(b.text)),
    )
    return a.text[max(same - SHOWN_CHARACTERS // 3, 0) :][:SHOWN_CHARACTERS]


def label(result: ArmResult) -> str:
    """An arm in a few characters."""
    return f"{result.name} x{result.batch_size}"


def spread(low: float, high: float, rounds: int, digits: int) -> str:
    """Smallest and largest round; `-` of a single round, which has no spread."""
    return f"[{low:.{digits}f} .. {high:.{digits}f}]" if rounds > 1 else "-"


def table(results: Sequence[ArmResult]) -> str:
    """One row an arm: medians, and of the decode speed the spread."""
    head = ("batch", "arm", "prefill tok/s", "decode tok/s", "[min .. max]", "draft ms",
            "verify ms", "host", "requests", "accepted")  # fmt: skip
    rows = [head]
    for result in results:
        f = figures(result)
        decode = f["decode_tokens_per_s"]
        step = f["verify_ms_per_step"]["median"]
        draft = f["draft_ms_per_step"]["median"]
        rows.append(
            (
                str(result.batch_size),
                result.name,
                f"{f['prefill_tokens_per_s']['median']:.1f}",
                f"{decode['median']:.1f}",
                spread(decode["min"], decode["max"], len(result.samples), 1),
                f"{draft:.2f}" if draft else "-",
                f"{step:.2f}" if step else "-",
                f"{f['host_share']['median']:.1%}" if step else "-",
                f"{f['requests_per_step']['median']:.2f}" if step else "-",
                f"{f['mean_accepted_length']['median']:.2f}" if step else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 1 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def weighed(arm: str, weights: dict[str, str]) -> str:
    """A label, and where another runtime is compared with, what its weights are held in."""
    name = arm.rpartition(" x")[0]
    if len(weights) < 2:
        return arm
    return f"{arm} ({weights.get(name, weights[OURS])} weights)"


def text(record: dict[str, Any], results: Sequence[ArmResult]) -> str:
    """The whole report for a terminal."""
    lines = [table(results), ""]
    weights = record["settings"]["weights"]
    rounds = min(len(result.samples) for result in results)
    if record["settings"]["same_checkpoint"] is False:
        lines.append("the compared model is not the checkpoint that the engine was built from")
    for result in results:
        shares = accepted_by_position(result)
        if any(shares):
            shown = "  ".join(f"{k}: {share:.0%}" for k, share in enumerate(shares, 1))
            lines.append(f"accepted up to position, {label(result)}:  {shown}")
    for one in record["ratios"]:
        shown = f" {spread(one['min'], one['max'], rounds, 2)}" if rounds > 1 else ""
        sides = " / ".join(weighed(one[side], weights) for side in ("of", "over"))
        lines.append(f"decode speed, {sides}: {one['median']:.2f}x{shown}")
    for one in record["agreement"]:
        lines.append(
            f"greedy texts, {one['of']} and {one['with']}: {one['equal']} of {one['prompts']} equal"
        )
        if one["first_difference"] is not None:
            lines.append(f"  first difference: {one['first_difference']}")
    return "\n".join(lines)


def curves(results: Sequence[ArmResult]) -> dict[str, list[float]]:
    """Acceptance by position; arms whose curves would hide each other share one, and its name."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for result in results:
        key = tuple(round(share, 3) for share in accepted_by_position(result))
        groups.setdefault(key, []).append(label(result))
    return {", ".join(names): list(shares) for shares, names in groups.items()}


def plot(results: Sequence[ArmResult], title: str, kind: str) -> bytes:
    """Decode speed of each arm, and acceptance by position where there is any; an image file."""
    figure_of = load_extra("matplotlib.figure", extra="plot", wanted_by="--plot").Figure
    drafted = [r for r in results if any(accepted_by_position(r))]
    figure = figure_of(figsize=(11 if drafted else 6.5, 4), layout="constrained")
    axes = figure.subplots(1, 2 if drafted else 1, squeeze=False)[0]
    rates = [figures(r)["decode_tokens_per_s"] for r in results]
    medians = [rate["median"] for rate in rates]
    ends = [
        [m - r["min"] for m, r in zip(medians, rates)],
        [r["max"] - m for m, r in zip(medians, rates)],
    ]
    bars = {"xerr": ends} if max(len(r.samples) for r in results) > 1 else {}
    axes[0].barh(list(map(label, results)), medians, color="#4477aa", **bars)
    axes[0].invert_yaxis()
    note = " (lines: smallest to largest round)" if bars else " (one round)"
    axes[0].set(xlabel=f"decode tokens/s{note}", title=title)
    for names, shares in curves(drafted).items():
        axes[1].plot(range(1, len(shares) + 1), shares, marker="o", label=names)
    if drafted:
        axes[1].set(xlabel="position in the block", ylabel="accepted", ylim=(0, 1))
        longest = max(len(accepted_by_position(r)) for r in drafted)
        axes[1].set_xticks(range(1, longest + 1))
        axes[1].legend()
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=150)
    return image.getvalue()
