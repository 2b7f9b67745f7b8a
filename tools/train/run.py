"""`dspark train` from data to files: what happens between the command line and the loop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from dspark_trt.build.checkpoint import open_drafter, open_target
from dspark_trt.build.source import TargetCheckpoint
from dspark_trt.runtime.typed_json import JsonError, read_json
from dspark_trt.tools.provenance import provenance
from dspark_trt.tools.train.checkpoint import (
    FOLDER,
    Progress,
    load_checkpoint,
    load_drafter,
)
from dspark_trt.tools.train.config import TrainConfig, TrainError, config_from_file, require
from dspark_trt.tools.train.conversation import unused_token
from dspark_trt.tools.train.corpus import Corpus, check_trainable, read_corpus
from dspark_trt.tools.train.data import DataOptions, import_log, say, write_data
from dspark_trt.tools.train.drafter import Drafter, initialize
from dspark_trt.tools.train.evaluate import evaluate
from dspark_trt.tools.train.export import save_drafter
from dspark_trt.tools.train.log import draw_curves, summary, without_nan
from dspark_trt.tools.train.loop import Trainer
from dspark_trt.tools.train.step import DraftStep
from dspark_trt.tools.train.target import TorchTarget
from dspark_trt.tools.train.team import Team, join_team, leave_team

CONFIG, RUN, REPORT = "config.json", "run.json", "report.json"
DRAFTER, DRAFTER_INT8 = "drafter", "drafter-int8"
MIN_HELD_OUT = 2  # documents


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line asks for, settings of the training itself aside."""

    output: Path
    model: Path | None = None
    tokenizer: Path | None = None
    corpus: Path | None = None
    data: DataOptions | None = None
    log: Path | None = None
    resume: Path | None = None
    device: str = "auto"
    data_only: bool = False
    export_int8: bool = False
    stop_after: float = 0.0

    @property
    def has_data(self) -> bool:
        """Whether the command names data of its own."""
        return self.corpus is not None or self.data is not None or self.log is not None


def run(options: RunOptions, settings: TrainConfig | None, argv: Sequence[str]) -> int:
    """Run the command; `settings` is None where the resumed run's own stand. The exit code."""
    team = join_team(options.device)
    try:
        torch.set_float32_matmul_precision("high")
        if hasattr(torch._dynamo.config, "recompile_limit"):
            torch._dynamo.config.recompile_limit = 64  # one graph a shape, and shapes are few
        return _Run(options, settings, team, argv).go()
    finally:
        leave_team(team)


class _Run:
    def __init__(
        self,
        options: RunOptions,
        settings: TrainConfig | None,
        team: Team,
        argv: Sequence[str],
    ) -> None:
        self.options, self.team, self.argv = options, team, argv
        self.continues = options.resume is not None and not options.has_data
        self.output = options.output
        saved = _read_run(options.resume) if options.resume is not None else {}
        model = options.model or (Path(saved["model"]) if "model" in saved else None)
        require(model is not None, "--model is missing: name the target's checkpoint")
        assert model is not None
        self.checkpoint: TargetCheckpoint = open_target(model, options.tokenizer)
        self.corpus_path = options.corpus or (
            Path(saved["corpus"]) if self.continues else self.output / "data"
        )
        own = settings or TrainConfig()
        token = unused_token(self.checkpoint.tokenizer, self.checkpoint.dims.vocab_size)
        self.config = own.resolved(self.checkpoint.dims, token)
        self.run_file = {"model": str(model.resolve()), "corpus": str(self.corpus_path.resolve())}
        if not self.continues:
            self._require_new()

    def _require_new(self) -> None:
        require(
            not (self.output / FOLDER).exists(),
            f"{self.output} holds a run already: go on with --resume {self.output}, or name "
            "another --output",
        )

    def go(self) -> int:
        """Data, training, files."""
        target = self._target()
        self._write_data(target)
        if self.options.data_only:
            return 0
        training, held_out = self._split()
        step = self._step(target)
        state: dict[str, Any] = {}
        if self.options.resume is not None:
            state = load_checkpoint(self.options.resume, self.team.device)
            load_drafter(step.drafter, state, self.options.resume)
        before = {}
        if self.options.resume is not None and not self.continues and self.team.leads:
            before = evaluate(step, held_out, self.config)
            say(f"held out, before: {summary(before)}")
        if self.team.leads:
            self._save_settings()
        trainer = Trainer(
            step,
            training,
            held_out,
            self.config,
            output=self.output,
            team=self.team,
            progress=Progress(**state["progress"]) if self.continues else Progress(),
            optimizer_state=state["optimizer"] if self.continues else None,
        )
        if not trainer.run(self.options.stop_after):
            if self.team.leads:
                say(f"stopped at step {trainer.progress.step}: go on with --resume {self.output}")
            return 0
        after = trainer.evaluate()
        if self.team.leads:
            self._finish(step.drafter, trainer, before, after)
        self.team.wait()
        return 0

    def _target(self) -> TorchTarget:
        tokens = self.config.row_tokens
        if self.options.data is not None:
            tokens = max(tokens, self.options.data.document_tokens)
        compiled = self.config.compile and self.team.device.type == "cuda"
        return TorchTarget(
            self.checkpoint, self.team.device, max_tokens=tokens + 1, compiled=compiled
        )

    def _write_data(self, target: TorchTarget) -> None:
        """The data directory, filled as far as the command asks."""
        options, team = self.options, self.team
        if options.log is not None and team.leads:
            import_log(self.checkpoint, options.log, self.corpus_path)
        if options.data is not None:
            there = written_tokens(self.corpus_path)
            left = options.data.synthesize - there
            if there and left <= 0:
                say(f"data: {self.corpus_path} already holds {there} tokens")
            else:
                wanted = max(left, 0) if options.data.synthesize else 0
                part = dataclasses.replace(
                    options.data, synthesize=wanted, seed=options.data.seed + there
                )
                write_data(
                    self.checkpoint, target, part, self.corpus_path, part=(team.rank, team.size)
                )
                if team.device.type == "cuda":
                    torch.cuda.empty_cache()
        team.wait()

    def _split(self) -> tuple[Corpus, Corpus]:
        config, name = self.config, str(self.corpus_path)
        corpus = read_corpus(self.corpus_path, vocab_size=self.checkpoint.dims.vocab_size)
        training, held_out = corpus.split(config.held_out)
        check_trainable(
            training, block_size=config.block_size, row_tokens=config.row_tokens, name=name
        )
        if self.team.leads:
            cut = int((corpus.lengths > config.row_tokens).sum())
            say(
                f"data: {len(training)} documents of {int(training.lengths.sum())} tokens to train "
                f"on, {len(held_out)} held out, {cut} cut at {config.row_tokens} tokens"
            )
            if len(held_out) < MIN_HELD_OUT:
                say("data: next to nothing is held out: raise --held-out, or write more data")
        return training, held_out

    def _step(self, target: TorchTarget) -> DraftStep:
        drafter = Drafter(self.config.drafter_dims(self.checkpoint.dims))
        initialize(drafter, target.embed, target.norm, seed=self.config.seed)
        count = sum(parameter.numel() for parameter in drafter.parameters())
        if self.team.leads:
            say(f"drafter: {count / 1e6:.2f} M weights, {self.config.layers} layers")
        return DraftStep(drafter.to(self.team.device), target, self.config)

    def _save_settings(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / CONFIG).write_text(self.config.to_json(), encoding="utf-8")
        text = json.dumps(self.run_file, indent=2) + "\n"
        (self.output / RUN).write_text(text, encoding="utf-8")

    def _finish(
        self, drafter: Drafter, trainer: Trainer, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        """Files of a finished run: the drafter, its report, the picture."""
        dims = self.checkpoint.dims
        folder = self.output / DRAFTER
        save_drafter(folder, drafter, dims, anchors=self.config.anchors)
        open_drafter(folder, dims)  # what was written can be read
        if self.options.export_int8:
            small = self.output / DRAFTER_INT8
            save_drafter(small, drafter, dims, anchors=self.config.anchors, int8=True)
            size = (small / "model.safetensors").stat().st_size
            say(f"wrote {small}: {size / 1e6:.2f} MB")
        report = {
            **provenance(["train", *self.argv], libraries=["torch", "safetensors"]),
            "device": _device_name(self.team.device),
            "config": dataclasses.asdict(self.config),
            "target": self.checkpoint.content_hash,
            "steps": trainer.progress.step,
            "seconds": round(trainer.progress.seconds, 1),
            "epochs": trainer.progress.epoch,
            "before": without_nan(before),
            "after": without_nan(after),
        }
        text = json.dumps(report, indent=2) + "\n"
        (self.output / REPORT).write_text(text, encoding="utf-8")
        draw_curves(self.output)
        if before.get("blocks") and after.get("blocks"):
            for name in ("argmax_length", "sampled_length"):
                gain = after[name] / before[name] - 1
                say(f"{name}: {before[name]:.3f} -> {after[name]:.3f} ({gain:+.1%})")
        say(f"wrote {folder}: give it to dspark build with --drafter")


def written_tokens(folder: Path) -> int:
    """Tokens of the complete shards in `folder`."""
    import numpy as np

    ends = [np.load(path, mmap_mode="r")["end"] for path in folder.glob("[!.]*.documents.npy")]
    return sum(int(end[-1]) for end in ends)


def _read_run(resume: Path) -> dict[str, str]:
    """What a run says of its model and data."""
    try:
        values = read_json(resume / RUN, max_bytes=1 << 20)
    except (OSError, JsonError) as error:
        raise TrainError(f"{resume} holds no run of dspark train ({error})") from None
    return {str(key): str(value) for key, value in dict(values).items()}


def resumed_config(resume: Path, changes: dict[str, object]) -> TrainConfig:
    """The settings of the run in `resume`, with `changes` over them."""
    require((resume / CONFIG).is_file(), f"{resume} holds no run of dspark train: no {CONFIG}")
    return config_from_file(resume / CONFIG, changes)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
