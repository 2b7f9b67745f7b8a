"""Two processes over gloo train what one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from factories import tiny_target
from train_case import random_corpus

from dspark_trt.tools.train.checkpoint import load_checkpoint

SETTINGS = [
    *("--layers", "1", "--rank", "8", "--block-size", "4", "--intermediate-size", "48"),
    *("--row-tokens", "48", "--anchors", "16", "--rows", "4", "--vocabulary-chunk", "64"),
    *("--steps", "3", "--held-out", "0.3", "--learning-rate", "0.001", "--device", "cpu"),
]


def train(target: Path, data: Path, output: Path, *launcher: str) -> str:
    command = [sys.executable, *launcher, "-m", "dspark_trt.tools.cli", "train"]
    if launcher:
        command = [sys.executable, *launcher, "--module", "dspark_trt.tools.cli", "train"]
    places = ["--model", str(target), "--corpus", str(data), "--output", str(output)]
    done = subprocess.run(
        [*command, *places, *SETTINGS], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "llama")
    random_corpus(tmp_path / "data", 256, [30] * 40)
    train(target, tmp_path / "data", tmp_path / "one")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    train(target, tmp_path / "data", tmp_path / "two", *launcher)
    one, two = (load_checkpoint(tmp_path / n, torch.device("cpu")) for n in ("one", "two"))
    assert one["progress"]["step"] == two["progress"]["step"] == 3
    for name, value in one["drafter"].items():
        torch.testing.assert_close(two["drafter"][name], value, atol=2e-5, rtol=1e-4)
    reports = [json.loads((tmp_path / n / "report.json").read_text()) for n in ("one", "two")]
    assert reports[0]["after"]["blocks"] == reports[1]["after"]["blocks"] > 0
