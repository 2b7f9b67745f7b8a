"""`dspark build`: the options reach the builder, and refusals come before the work."""

from __future__ import annotations

import io
import re
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model m --output e --max_seq_len 20", "--max_seq_len: did you mean --max-seq-len?"),
        ("--model m --output e --max_batch_size=2", "did you mean --max-batch-size?"),
        ("--checkpoint_dir m --output e", "--checkpoint_dir: did you mean --model?"),
        ("--model m --output_dir=e", "--output_dir: did you mean --output?"),
        ("--model m --output e --tokens_per_block 8", "did you mean --page-size?"),
        ("--model m --output e --max_draft_len 4", "did you mean --drafter?"),
        ("--model m --output e --gemm_plugin auto", "see the table of trtllm-build in README.md"),
        ("--model m --output e --max_nothing 1", "unrecognized arguments: --max_nothing 1"),
    ],
)
def test_flags_of_trtllm_build_get_a_hint(
    flags: str, words: str, capsys: pytest.CaptureFixture[str], asked: list[builder.BuildOptions]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["build", *flags.split()])
    assert raised.value.code == 2
    assert words in capsys.readouterr().err
    assert asked == []


def test_every_flag_of_the_readme_s_table_is_known() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.split("### Coming from trtllm-build")[1].split("\n## ")[0]
    theirs = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    flags = [flag for cell in theirs for flag in re.findall("`(--[a-z_]+)`", cell)]
    known = re.findall("--[a-z-]+", build.arguments().format_usage())
    assert len(flags) > 20
    assert [flag for flag in flags if build.flag_hint([flag], known) is None] == []


def test_help_says_where_lengths_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # lines are broken at hyphens too
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens of a prompt, default: one less than --max-seq-len" in out
    assert "default: the checkpoint's, at most 4096" in out


def test_an_output_that_holds_the_model_is_refused_first(
    tmp_path: Path, asked: list[builder.BuildOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e").mkdir()
    flags = ["--model", str(tmp_path / "e" / "m.gguf"), "--output", str(tmp_path / "e")]
    assert main(["build", *flags]) == 2
    assert "overlap" in capsys.readouterr().err
    assert asked == []
