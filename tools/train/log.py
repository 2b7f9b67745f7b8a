"""A run's figures: a line on stderr, a CSV file, a JSON lines file, a picture at the end."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_trt.tools.extras import MissingExtraError, load_extra
from dspark_trt.tools.train.checkpoint import Progress
from dspark_trt.tools.train.config import TrainConfig
from dspark_trt.tools.train.data import say

if TYPE_CHECKING:
    from dspark_trt.tools.train.loop import StepFigures

STEPS, EVALUATIONS, PICTURE = "steps.csv", "evaluations.jsonl", "curves.png"
COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "learning_rate",
    "loss",
    "ce",
    "l1",
    "bce",
    "acceptance",
    "agreement",
    "gradient_norm",
    "tokens_per_second",
    "slots_per_second",
)


class TrainLog:
    """Writes the figures of a run; `active` in one process alone."""

    def __init__(self, output: Path, config: TrainConfig, *, active: bool) -> None:
        self._output, self._config, self._active = output, config, active
        self._pending: list[StepFigures] = []
        self._since = time.monotonic()

    def step(
        self, figures: StepFigures, progress: Progress, rate: float, last_step: int, bar: Any
    ) -> None:
        """Take one step's figures; every `log_every` steps their means are written."""
        if not self._active:
            return
        self._pending.append(figures)
        if len(self._pending) < self._config.log_every and figures.step < last_step:
            return
        now, pending = time.monotonic(), self._pending
        seconds = max(now - self._since, 1e-9)
        mean = {
            name: sum(getattr(f, name) for f in pending) / len(pending)
            for name in ("loss", "ce", "l1", "bce", "agree", "norm")
        }
        tokens = sum(f.rows for f in pending) * self._config.row_tokens / seconds
        slots = sum(f.slots for f in pending) / seconds
        left = self._left(progress, len(pending) / seconds, last_step)
        values = [
            figures.step,
            progress.epoch,
            round(progress.seconds, 2),
            f"{rate:.4g}",
            *(f"{mean[name]:.5f}" for name in ("loss", "ce", "l1", "bce")),
            f"{1 - mean['l1'] / 2:.5f}",
            f"{mean['agree']:.5f}",
            f"{mean['norm']:.4g}",
            round(tokens),
            round(slots),
        ]
        self._append(values)
        line = (
            f"step {figures.step}: loss {mean['loss']:.4f}, accept {1 - mean['l1'] / 2:.3f}, "
            f"argmax {mean['agree']:.3f}, {tokens:,.0f} tokens/s, {slots:,.0f} slots/s, "
            f"{left:,.0f} s left"
        )
        if bar.disable:
            say(line)
        else:
            bar.set_postfix_str(f"loss {mean['loss']:.3f} accept {1 - mean['l1'] / 2:.3f}")
        self._pending, self._since = [], now

    def _left(self, progress: Progress, rate: float, last_step: int) -> float:
        """Seconds to the end, by the steps and by the clock."""
        left = (last_step - progress.step) / max(rate, 1e-9)
        if self._config.max_seconds:
            left = min(left, self._config.max_seconds - progress.seconds)
        return max(0.0, left)

    def _append(self, values: list[Any]) -> None:
        path = self._output / STEPS
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            writer.writerow(values)

    def evaluation(self, progress: Progress, found: dict[str, Any]) -> None:
        """Write one evaluation."""
        if not self._active:
            return
        line = {"step": progress.step, "seconds": round(progress.seconds, 2), **without_nan(found)}
        with (self._output / EVALUATIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        say(f"held out: {summary(found)}")
        self._since = time.monotonic()


def without_nan(found: dict[str, Any]) -> dict[str, Any]:
    """The figures with None for what was not measured, which JSON has no number for."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and math.isnan(value) else value

    return {name: plain(value) for name, value in found.items()}


def summary(found: dict[str, Any]) -> str:
    """An evaluation in one line."""
    if not found.get("blocks"):
        return "no held-out documents"
    rates = " ".join(f"{rate:.2f}" for rate in found["argmax_rates"])
    parts = [
        f"accepted length {found['argmax_length']:.3f} argmax ({rates})",
        f"{found['sampled_length']:.3f} sampled",
        f"{found['served_length']:.3f} served at temperature 0",
    ]
    if "confidence_auc" in found:
        parts.append(f"confidence AUC {found['confidence_auc']:.3f}")
    return ", ".join(parts) + f"; {found['blocks']} blocks"


def draw_curves(output: Path) -> None:
    """Draw the loss and the acceptance of a run; says so where matplotlib is missing."""
    try:
        matplotlib = load_extra("matplotlib", extra="plot", wanted_by=PICTURE)
    except MissingExtraError as error:
        say(f"no picture: {error}")
        return
    matplotlib.use("Agg")
    pyplot = load_extra("matplotlib.pyplot", extra="plot", wanted_by=PICTURE)
    steps = _read_steps(output / STEPS)
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    at = [row["step"] for row in steps]
    for name in ("loss", "ce", "l1", "bce"):
        axes[0].plot(at, [row[name] for row in steps], label=name)
    for name in ("acceptance", "agreement"):
        axes[1].plot(at, [row[name] for row in steps], label=name)
    lines = _read_evaluations(output / EVALUATIONS)
    for name in ("argmax_length", "sampled_length", "served_length"):
        points = [(line["step"], line[name]) for line in lines if line.get(name)]
        axes[2].plot(*zip(*points), marker="o", label=name) if points else None
    for axis, title in zip(axes, ("loss", "in training", "accepted length, held out")):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.legend()
    figure.tight_layout()
    figure.savefig(output / PICTURE, dpi=110)
    pyplot.close(figure)


def _read_steps(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _read_evaluations(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
