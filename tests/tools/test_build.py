"""`dspark build`: the options reach the builder, and refusals come before the work."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dspark_trt.build import builder
from dspark_trt.runtime.engine_dir import CheckpointInfo, Limits, Manifest, write_engine_dir
from dspark_trt.tools import build
from dspark_trt.tools.cli import main


def fake_engine(options: builder.BuildOptions) -> None:
    with write_engine_dir(options.output) as staged:
        (staged.path / "weights.bin").write_bytes(bytes(3_000_000))
        staged.describe(
            Manifest(
                dspark_version="0.1.0",
                versions={},
                created="",
                backend=options.backend,
                dtype=options.dtype,
                quantize=options.quantize,
                checkpoint=CheckpointInfo(options.model.name, "gguf", "", "Q4_1"),
                target={
                    "num_layers": 1,
                    "vocab_size": 9,
                    "eos_token_ids": [],
                    "layer": {"num_kv_heads": 1, "head_dim": 2},
                },
                limits=Limits(1, 1, 2, 1),
                page_size=options.page_size,
            )
        )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[builder.BuildOptions]:
    """The options that builds were asked for; the builds write next to nothing."""
    seen: list[builder.BuildOptions] = []

    def build_engine(options: builder.BuildOptions, *_: object) -> None:
        seen.append(options)
        fake_engine(options)

    monkeypatch.setattr(builder, "build_engine", build_engine)
    return seen


def test_every_flag_reaches_the_builder(
    tmp_path: Path, asked: list[builder.BuildOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        f"build --model m.gguf --drafter d --tokenizer t --output {tmp_path / 'e'} --quantize int4 "
        "--backend onnxruntime --dtype float32 --max-batch-size 3 --max-input-len 10 "
        "--max-seq-len 20 --max-num-tokens 40 --page-size 16 --gather-context-logits "
        "--gather-generation-logits"
    )
    assert main(flags.split()) == 0
    assert asked == [
        builder.BuildOptions(
            model=Path("m.gguf"),
            drafter=Path("d"),
            tokenizer=Path("t"),
            output=tmp_path / "e",
            quantize="int4",
            max_batch_size=3,
            max_input_len=10,
            max_seq_len=20,
            max_num_tokens=40,
            page_size=16,
            gather_context_logits=True,
            gather_generation_logits=True,
        )
    ]
    out = capsys.readouterr().out
    assert f"built {tmp_path / 'e'}: m.gguf for onnxruntime (float32, int4 weights), 3 MB" in out


def test_defaults_are_the_builder_s(tmp_path: Path, asked: list[builder.BuildOptions]) -> None:
    assert main(["build", "--model", "m", "--output", str(tmp_path / "e")]) == 0
    assert asked == [builder.BuildOptions(model=Path("m"), output=tmp_path / "e")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model m", "required: --output"),
        ("--output e", "required: --model"),
        ("--model m --output e --page-size 0", "--page-size: must be an integer >= 1, got 0"),
        ("--model m --output e --max-batch-size two", "must be an integer >= 1, got 'two'"),
        ("--model m --output e --quantize int2", "--quantize: invalid choice: 'int2'"),
        ("--model m --output e --max-batch 3", "unrecognized arguments"),
    ],
)
def test_wrong_usage_is_code_2(
    flags: str, words: str, capsys: pytest.CaptureFixture[str], asked: list[builder.BuildOptions]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["build", *flags.split()])
    assert raised.value.code == 2
    assert words in capsys.readouterr().err
    assert asked == []


def test_an_output_that_is_no_engine_is_refused_first(
    tmp_path: Path, asked: list[builder.BuildOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").touch()
    assert main(["build", "--model", "m", "--output", str(tmp_path)]) == 2
    assert "holds no engine" in capsys.readouterr().err
    assert asked == []


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(build.sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    bar = build.ProgressBar()
    bar.show(10, 100, "norm.weight")
    bar.show(100, 100, "lm_head.weight")
    bar.close()
    assert ("weights" in stream.getvalue()) == terminal
