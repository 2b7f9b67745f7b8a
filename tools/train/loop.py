"""The training loop.

1. take the step's batches, made ahead by a thread
2. forward and backward of each; the loss is divided by the step's sum of weights over all processes
3. clip, step; the step's figures go to the host without waiting
4. look at the figures of the step before: stop at the first loss that is no number or explodes
5. log, checkpoint and evaluate when their time has come
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark_trt.tools.progress import progress_bar
from dspark_trt.tools.train.batches import RowPlan, StepData, prefetched, step_data
from dspark_trt.tools.train.checkpoint import FOLDER, Progress, save_checkpoint
from dspark_trt.tools.train.config import TrainConfig, TrainError
from dspark_trt.tools.train.corpus import Corpus
from dspark_trt.tools.train.evaluate import evaluate
from dspark_trt.tools.train.log import TrainLog
from dspark_trt.tools.train.schedule import learning_rate
from dspark_trt.tools.train.step import DraftStep
from dspark_trt.tools.train.team import Team

FIGURES = ("loss", "ce", "l1", "bce", "agree")


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step did, on the host."""

    step: int
    loss: float
    ce: float
    l1: float
    bce: float
    agree: float  # share of slots where the argmaxes agree
    norms: list[float]  # of each gradient, before clipping
    rows: int
    slots: int

    @property
    def norm(self) -> float:
        """Norm of the whole gradient."""
        return math.sqrt(sum(value * value for value in self.norms))


class Trainer:
    """Trains `step.drafter` on `corpus`; `progress` says where it stands."""

    def __init__(
        self,
        step: DraftStep,
        corpus: Corpus,
        held_out: Corpus,
        config: TrainConfig,
        *,
        output: Path,
        team: Team,
        progress: Progress,
        optimizer_state: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.team, self.output, self.progress = config, team, output, progress
        self._step, self._wrapped = step, team.wrap(step)
        self._corpus, self._held_out = corpus, held_out
        self._plan = RowPlan(corpus, config)
        named = list(step.drafter.named_parameters())
        self._names, self._parameters = [n for n, _ in named], [p for _, p in named]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            weight_decay=0.0,
            fused=team.device.type == "cuda",
        )
        if optimizer_state is not None:
            self._optimizer.load_state_dict(optimizer_state)
        rows = len(RowPlan(corpus, config).rows(0))
        by_epochs = max(1, math.ceil(config.epochs * rows / config.rows))
        self.last_step = min(config.steps or by_epochs, by_epochs)
        self._log = TrainLog(output, config, active=team.leads)
        self._began = time.monotonic() - progress.seconds

    def run(self, stop_after: float = 0.0) -> bool:
        """Train to the end, or for `stop_after` seconds (0: no bound); whether the end is reached.

        Raises `TrainError` where the loss explodes; the last checkpoint is good then.
        """
        part = (self.team.rank, self.team.size)
        at = (self.progress.epoch, self.progress.row)
        started = saved = evaluated = time.monotonic()

        def make(at: tuple[int, int]) -> StepData:
            return step_data(self._corpus, self._plan, self.config, at=at, part=part)

        with ExitStack() as stack:
            steps = stack.enter_context(closing(_generator(prefetched(make, at))))
            bar = stack.enter_context(progress_bar(self.last_step, "step"))
            bar.update(self.progress.step)
            waiting: Callable[[], StepFigures] | None = None
            while (share := self._share()) < 1:
                if stop_after and self.team.highest(time.monotonic() - started) >= stop_after:
                    break
                figures = self._one_step(next(steps), share)
                if waiting is not None:
                    self._look_at(waiting(), bar)
                waiting = figures
                bar.update()
                now = self.team.highest(time.monotonic())
                if self.config.checkpoint_every and now - saved >= self.config.checkpoint_every:
                    self._look_at(waiting(), bar)
                    waiting, saved = None, now
                    self.save()
                if self.config.evaluate_every and now - evaluated >= self.config.evaluate_every:
                    self.evaluate()
                    evaluated = self.team.highest(time.monotonic())
            if waiting is not None:
                self._look_at(waiting(), bar)
        self.save()
        return share >= 1

    def _share(self) -> float:
        """The share of the run that is done, alike in all processes."""
        self.progress.seconds = time.monotonic() - self._began
        share = self.progress.step / self.last_step
        if self.config.max_seconds:
            share = max(share, self.progress.seconds / self.config.max_seconds)
        return self.team.highest(share) if self.config.max_seconds else share

    def _one_step(self, data: StepData, share: float) -> Callable[[], StepFigures]:
        """Run one step; the figures come when the function returned is called."""
        config, team = self.config, self.team
        weight, slots = team.sum([data.weight, float(data.slots)])
        rate = learning_rate(
            config.learning_rate,
            share,
            warmup=config.warmup,
            step=self.progress.step,
            by_clock=bool(config.max_seconds),
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        sums: Tensor | None = None
        for number, batch in enumerate(data.batches):
            last = number == len(data.batches) - 1
            with ExitStack() as stack:
                if team.size > 1 and not last:
                    stack.enter_context(self._wrapped.no_sync())
                terms = self._wrapped(batch.to(team.device))
                (terms.total * (team.size / max(weight, 1e-9))).backward()
            each = torch.cat([terms.total.detach()[None], terms.parts])
            sums = each if sums is None else sums + each
        assert sums is not None
        norms = self._update()
        self.progress.step += 1
        self.progress.epoch, self.progress.row = data.epoch, data.row
        ready = _on_host(torch.cat([sums, norms]))
        step, rows = self.progress.step, config.rows

        def figures() -> StepFigures:
            values = ready()
            total, ce, l1, bce, agree = team.sum(values[: len(FIGURES)])
            return StepFigures(
                step=step,
                loss=total / max(weight, 1e-9),
                ce=ce / max(weight, 1e-9),
                l1=l1 / max(weight, 1e-9),
                bce=bce / max(weight, 1e-9),
                agree=agree / max(slots, 1.0),
                norms=values[len(FIGURES) :],
                rows=rows,
                slots=int(slots),
            )

        return figures

    def _update(self) -> Tensor:
        """Clip the gradients and step; the norm of each before clipping."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert len(gradients) == len(self._parameters)
        norms = torch.stack(torch._foreach_norm(gradients))
        factor = (self.config.gradient_norm / (norms.norm() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norms

    def _look_at(self, figures: StepFigures, bar: Any) -> None:
        """Stop where the step went wrong; log it where its turn has come."""
        broken = not math.isfinite(figures.loss) or not math.isfinite(figures.norm)
        if broken or figures.loss > self.config.max_loss:
            raise TrainError(self._what_broke(figures))
        rate = self._optimizer.param_groups[0]["lr"]
        self._log.step(figures, self.progress, rate, self.last_step, bar)

    def _what_broke(self, figures: StepFigures) -> str:
        named = [n for n, v in zip(self._names, figures.norms) if not math.isfinite(v)]
        where = f"; the first gradient that is no number is that of {named[0]}" if named else ""
        state = self.output / FOLDER
        kept = f"the last good checkpoint is {state}" if state.exists() else "no checkpoint yet"
        return (
            f"the loss of step {figures.step} is {figures.loss:.4g} (max_loss "
            f"{self.config.max_loss:g}){where}; {kept}: go on from there with --resume and a lower "
            "--learning-rate"
        )

    def save(self) -> None:
        """Write a checkpoint."""
        if self.team.leads:
            save_checkpoint(self.output, self._step.drafter, self._optimizer, self.progress)
        self.team.wait()

    def evaluate(self) -> dict[str, Any]:
        """Acceptance on the held-out documents; {} in the processes that do not lead."""
        found: dict[str, Any] = {}
        if self.team.leads:
            found = evaluate(self._step, self._held_out, self.config)
            self._log.evaluation(self.progress, found)
        self.team.wait()
        return found


def _generator(steps: Iterator[StepData]) -> Any:
    """`steps` typed as something that can be closed."""
    return steps


def _on_host(values: Tensor) -> Callable[[], list[float]]:
    """Start the copy of `values` to the host; the function returned waits for it alone."""
    if values.device.type != "cuda":
        return values.tolist
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[float]:
        done.synchronize()
        return list(copy.tolist())

    return wait
