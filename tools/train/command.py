"""The command line of `dspark train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_trt.tools.options import integer, integers, numbers, parser
from dspark_trt.tools.train.config import (
    ATTENTION,
    MAX_TEMPERATURE,
    TrainConfig,
    config_from_file,
    require,
)

EXAMPLES = """\
  dspark train --model SmolLM2-135M-Instruct.gguf --synthesize 20000000 --output runs/first
  dspark train --model ./Llama-3.2-1B --prompts prompts.jsonl --layers 3 --output runs/second
  dspark train --resume runs/first
  dspark train --resume runs/first --data served.jsonl --epochs 2 --output runs/adapted"""

# Flag, type, help; the field of TrainConfig is the flag's name.
SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("--layers", int, "decoder layers of the drafter"),
    ("--block-size", int, "tokens drafted at once"),
    ("--head", str, "sequential head: vanilla, gated, rnn or none"),
    ("--rank", int, "rank of the sequential head"),
    ("--intermediate-size", int, "width of the drafter's MLP; 0: the target's"),
    ("--mask-token-id", int, "token of the undrafted slots; -1: an unused special token"),
    ("--row-tokens", int, "tokens of a packed row; longer documents are cut"),
    ("--anchors", int, "anchors sampled in each row"),
    ("--held-out", float, "share of the documents that is held out"),
    ("--seed", int, "of data, weights and order"),
    ("--ce-weight", float, "weight of the cross-entropy"),
    ("--tv-weight", float, "weight of the L1 distance"),
    ("--confidence-weight", float, "weight of the confidence head's loss"),
    ("--decay", float, "positions count exp(-(k - 1) / decay)"),
    ("--rows", int, "rows of a step, over all processes"),
    ("--micro-rows", int, "rows of one forward pass; 0: all of the process's"),
    ("--learning-rate", float, "the peak"),
    ("--warmup", float, "share of the run with a rising rate"),
    ("--gradient-norm", float, "where gradients are clipped"),
    ("--epochs", float, "passes over the data at most"),
    ("--steps", int, "steps at most; 0: by the epochs"),
    ("--max-seconds", float, "training time at most; the schedule then follows the clock"),
    ("--max-loss", float, "a loss above this stops the run"),
    ("--attention", str, f"one of {', '.join(ATTENTION)}"),
    ("--vocabulary-chunk", int, "block positions whose logits exist at once"),
    ("--checkpoint-every", float, "seconds between checkpoints; 0: at the end alone"),
    ("--evaluate-every", float, "seconds between evaluations; 0: at the end alone"),
    ("--evaluation-rows", int, "held-out rows that are evaluated"),
    ("--log-every", int, "steps between lines of the log"),
)


def arguments() -> argparse.ArgumentParser:
    """The options of `dspark train`; settings keep None where they are not given."""
    made = parser(
        "train",
        description="Train a DSpark drafter for a target, on answers that the target writes. "
        "Needs PyTorch; uses an NVIDIA GPU where there is one, several under torchrun.",
        examples=EXAMPLES,
    )
    add = made.add_argument
    add("--model", type=Path, metavar="PATH", help="the target: what dspark build takes")
    add("--output", type=Path, metavar="DIR", help="folder of the run")
    add("--tokenizer", type=Path, metavar="PATH", help="tokenizer, where the model brings none")
    add("--config", type=Path, metavar="FILE", help="settings as JSON; flags win over it")
    add("--resume", type=Path, metavar="DIR", help="go on with this run, on new data if given")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: %(default)s")
    add("--export-int8", action="store_true", help="also write the drafter in 8 bits")
    add("--stop-after", type=float, default=0.0, metavar="S", help="stop, to be resumed")
    _add_data(made)
    settings = made.add_argument_group("settings")
    defaults = TrainConfig()
    for flag, kind, text in SETTINGS:
        default = getattr(defaults, _field(flag))
        settings.add_argument(flag, type=kind, metavar="X", help=f"{text}, default: {default}")
    settings.add_argument(
        "--feature-layers",
        type=integers(-1),
        metavar="I,..",
        help="target layers (-1, the embeddings, as in --feature-layers=-1,3,7), default: spread",
    )
    for flag, field, value, text in (
        ("--no-confidence", "confidence", False, "no confidence head"),
        ("--detach-confidence", "detach_confidence", True, "its loss leaves the backbone alone"),
        ("--no-compile", "compile", False, "do not compile on the GPU"),
    ):
        settings.add_argument(flag, dest=field, action="store_const", const=value, help=text)
    return made


def _add_data(made: argparse.ArgumentParser) -> None:
    data = made.add_argument_group("data")
    add = data.add_argument
    add("--synthesize", type=integer(1), default=0, metavar="N", help="tokens the target writes")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines; the target answers each")
    add("--data", type=Path, metavar="FILE", help="a log: JSON lines with prompt and response")
    add("--corpus", type=Path, metavar="DIR", help="data directory, default: OUTPUT/data")
    add("--data-only", action="store_true", help="write the data and stop")
    add("--data-seconds", type=float, default=0.0, metavar="S", help="time for writing, at most")
    for flag, default, whose in (
        ("--temperatures", "0,0.7,1", "answers"),
        ("--user-temperatures", "0.7,0.9,1", "user turns"),
    ):
        text = f"of the {whose}, in turn, default: {default}"
        add(flag, type=numbers(0, MAX_TEMPERATURE), default=default, metavar="T,..", help=text)
    add("--styles", type=Path, metavar="FILE", help="how synthesized user turns begin and end")
    add("--document-tokens", type=integer(16), default=1024, metavar="N", help="longest document")
    add("--user-tokens", type=integer(1), default=256, metavar="N", help="longest user turn")
    add("--answer-tokens", type=integer(1), default=512, metavar="N", help="longest answer")
    add("--slots", type=integer(0), default=0, metavar="N", help="documents written at once")
    add(
        "--decode-attention",
        default="auto",
        choices=["auto", "triton", "sdpa"],
        help="kernel that reads the target's cache, default: %(default)s",
    )
    add("--no-graph", action="store_true", help="decode without a CUDA graph")


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def main(argv: Sequence[str]) -> int:
    """Run `dspark train`; the exit code."""
    asked = arguments().parse_args(argv)
    require(
        asked.output is not None or asked.resume is not None,
        "--output is missing: name a folder for the run",
    )
    changes = _changes(asked)
    if asked.config is not None:
        settings = config_from_file(asked.config, changes)
    elif asked.resume is not None:
        from dspark_trt.tools.train.run import resumed_config

        settings = resumed_config(asked.resume, changes)
    else:
        settings = TrainConfig(**changes)
    return _start(asked, settings, argv)


def _changes(asked: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags give."""
    names = [_field(flag) for flag, _, _ in SETTINGS]
    names += ["feature_layers", "confidence", "detach_confidence", "compile"]
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    if "feature_layers" in given:
        given["feature_layers"] = tuple(given["feature_layers"])
    return given


def _start(asked: argparse.Namespace, settings: TrainConfig, argv: Sequence[str]) -> int:
    from dspark_trt.tools.train.data import DataOptions
    from dspark_trt.tools.train.run import RunOptions, run

    data = None
    if asked.synthesize or asked.prompts is not None:
        data = DataOptions(
            synthesize=asked.synthesize,
            prompts=asked.prompts,
            styles=asked.styles,
            max_seconds=asked.data_seconds,
            temperatures=tuple(asked.temperatures),
            user_temperatures=tuple(asked.user_temperatures),
            document_tokens=asked.document_tokens,
            user_tokens=asked.user_tokens,
            answer_tokens=asked.answer_tokens,
            slots=asked.slots,
            seed=settings.seed,
            attention=asked.decode_attention,
            graph=not asked.no_graph,
        )
    named = data is not None or asked.data is not None or asked.corpus is not None
    require(
        named or asked.resume is not None,
        "no data: give --synthesize N, --prompts FILE, --data FILE or --corpus DIR",
    )
    require(
        not (named and asked.resume is not None and asked.output is None),
        "--resume with new data needs --output: the resumed run stays as it is",
    )
    options = RunOptions(
        output=asked.output or asked.resume,
        model=asked.model,
        tokenizer=asked.tokenizer,
        corpus=asked.corpus,
        data=data,
        log=asked.data,
        resume=asked.resume,
        device=asked.device,
        data_only=asked.data_only,
        export_int8=asked.export_int8,
        stop_after=asked.stop_after,
    )
    return run(options, settings, argv)
