"""`dspark generate` on tiny engines: text, figures, JSON lines, and every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_engines import Tiny

from dspark_trt.runtime import llm as llm_module
from dspark_trt.runtime.llm import LLM, SamplingParams
from dspark_trt.tools import generate
from dspark_trt.tools.answers import rate, shortened
from dspark_trt.tools.cli import main
from dspark_trt.tools.encode import single_prompt
from dspark_trt.tools.prompts import Prompt

Capture = pytest.CaptureFixture[str]


def run(engine: Path, *flags: str) -> int:
    return main(["generate", str(engine), "--threads", "1", *flags])


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an engine is loaded."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine was loaded")

    monkeypatch.setattr(llm_module.LLM, "__init__", load)


def test_a_prompt_streams_its_text_and_figures_go_to_stderr(tiny: Tiny, capsys: Capture) -> None:
    assert run(tiny.drafted, "--prompt", "The river", "--max-tokens", "40") == 0
    out, err = capsys.readouterr()
    [expected] = LLM(tiny.drafted, threads=1).generate("The river", SamplingParams(max_tokens=40))
    assert out == expected.text + "\n"
    assert "40 tokens (length)" in err
    assert "prefill " in err
    assert "decode " in err
    assert f"(mean of {len(expected.accepted_lengths)}, bonus token counted)" in err
    assert f"accepted lengths {shortened(expected.accepted_lengths)}" in err
    assert max(expected.accepted_lengths) > 1


def test_drafts_change_no_token(tiny: Tiny, capsys: Capture) -> None:
    texts = []
    for flags in (
        [],
        ["--no-draft"],
        ["--max-draft", "1"],
        ["--policy", "threshold", "--threshold", "0.5"],
    ):
        assert run(tiny.drafted, "--prompt", "A word", "--max-tokens", "30", *flags) == 0
        texts.append(capsys.readouterr())
    assert len({t.out for t in texts}) == 1
    assert "drafting is off (--no-draft): each step gives one token" in texts[1].err


def test_an_engine_without_drafter_says_so(tiny: Tiny, capsys: Capture) -> None:
    assert run(tiny.plain, "--prompt", "A word", "--max-tokens", "30", "--chat") == 0
    err = capsys.readouterr().err
    assert "this engine has no drafter: each step gives one token" in err
    assert "accepted length" not in err


def test_an_answer_that_the_context_cuts_says_so(
    tiny: Tiny, prompts: Path, capsys: Capture
) -> None:
    words = "stopped at the context's end, max_seq_len 128, before --max-tokens\n"
    assert run(tiny.plain, "--prompt", "A word", "--max-tokens", "500", "--ignore-eos") == 0
    assert capsys.readouterr().err.endswith("\n" + words)
    flags = ["--prompts", str(prompts), "--chat", "--max-tokens", "500", "--ignore-eos"]
    assert run(tiny.plain, *flags) == 0
    assert capsys.readouterr().err.endswith("\n3 of 3 answers " + words)
    assert run(tiny.plain, "--prompt", "A word", "--max-tokens", "9", "--ignore-eos") == 0
    assert "context" not in capsys.readouterr().err


def test_a_flag_with_several_values_leaves_the_directory_alone(tiny: Tiny, capsys: Capture) -> None:
    argv = ["generate", "--prompt", "A", "--max-tokens", "3", "--threads", "1", "--stop", "zzz"]
    assert main([*argv, "--stop", "yyy", str(tiny.plain)]) == 0


def test_json_of_a_single_prompt_holds_all_of_it(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    flags = ["--prompt", "über", "--max-tokens", "9", "--json", str(path), "--logprobs", "2"]
    assert run(tiny.drafted, *flags) == 0
    [line] = json_lines(path.read_text(encoding="utf-8"))
    assert line["prompt"] == "über"
    assert line["finish_reason"] == "length"
    assert 1 + sum(line["accepted_lengths"]) == len(line["token_ids"]) == 9
    assert [one["token_id"] for one in line["logprobs"]] == line["token_ids"]
    assert all(len(one["top"]) == 2 for one in line["logprobs"])
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_json_to_stdout_takes_the_text_s_place(tiny: Tiny, capsys: Capture) -> None:
    flags = ["--prompt", "A", "--max-tokens", "5", "--n", "3", "--temperature", "1", "--seed", "4"]
    assert run(tiny.drafted, *flags, "--json", "-") == 0
    lines = json_lines(capsys.readouterr().out)
    assert [line["sequence_index"] for line in lines] == [0, 1, 2]
    assert len({line["text"] for line in lines}) > 1
    assert "logprobs" not in lines[0]
    assert run(tiny.drafted, *flags) == 0
    shown = capsys.readouterr().out
    assert all(line["text"] in shown for line in lines)
    assert "--- 3 of 3 (length): A\n" in shown


def test_a_file_of_prompts_is_one_batch(
    tiny: Tiny, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    flags = ["--prompts", str(prompts), "--chat", "--max-tokens", "12", "--json", str(path)]
    assert run(tiny.drafted, *flags) == 0
    out, err = capsys.readouterr()
    lines = json_lines(path.read_text())
    assert [line["prompt"] for line in lines[:2]] == ["The river", "A small model"]
    assert lines[2]["prompt"] == [{"role": "user", "content": "First, a word"}]
    model = LLM(tiny.drafted, threads=1)
    chats = [[{"role": "user", "content": t}] for t in ("The river", "A small model")]
    expected = model.chat(chats, SamplingParams(max_tokens=12))
    assert [line["token_ids"] for line in lines[:2]] == [c.token_ids for c in expected]
    assert "--- 3 of 3 (line 4, length): First, a word\n" in out
    assert "36 tokens in 3 answers (3 length)" in err


def test_a_file_of_one_prompt_shows_its_answer(tiny: Tiny, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "one"}')
    assert run(tiny.plain, "--prompts", str(path), "--max-tokens", "4", "--ignore-eos") == 0
    assert "--- 1 of 1 (line 1, length): one\n" in capsys.readouterr().out


def test_stop_strings_end_the_text(tiny: Tiny, capsys: Capture) -> None:
    assert run(tiny.drafted, "--prompt", "Where", "--max-tokens", "20") == 0
    whole = capsys.readouterr().out.rstrip("\n")
    stop = whole[5:7]
    assert run(tiny.drafted, "--prompt", "Where", "--stop", "\0none", "--stop", stop) == 0
    out, err = capsys.readouterr()
    assert out == whole[: whole.index(stop)] + "\n"
    assert "(stop)" in err


BAD = [
    (["--temperature", "-1"], "temperature must be 0 or a number in [1e-09, 1e+09], got -1.0"),
    (["--temperature", "nan"], "temperature must be 0 or a number in [1e-09, 1e+09], got nan"),
    (["--top-p", "0"], "top_p must be a number in (0, 1], got 0.0"),
    (["--top-p", "1.5"], "top_p must be a number in (0, 1], got 1.5"),
    (["--min-p", "inf"], "min_p must be a number in [0, 1], got inf"),
    (["--top-k", "-1"], "top_k must be an integer >= 0, got -1"),
    (["--seed", "-1"], "seed must be an integer in"),
    (["--n", "0"], "n must be an integer in [1, 256], got 0"),
    (["--stop", ""], "stop must be a non-empty string"),
    (["--repetition-penalty", "0"], "repetition_penalty must be"),
    (["--policy", "threshold", "--threshold", "1.5"], "threshold must be in [0, 1], got 1.5"),
    (["--policy", "threshold", "--threshold", "nan"], "threshold must be in [0, 1], got nan"),
    (["--prompt", ""], "--prompt must be text of at least one token, got ''"),
    (["--json", "absent/out.jsonl"], "there is no directory"),
    (["--json", "."], "output . is not a plain file"),
]


@pytest.mark.parametrize(("flags", "words"), BAD)
@pytest.mark.usefixtures("no_load")
def test_bad_values_are_one_line_and_code_2(
    tiny: Tiny, capsys: Capture, flags: list[str], words: str
) -> None:
    assert run(tiny.drafted, "--prompt", "A", *flags) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.startswith("dspark: error: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "one of the arguments --prompt --prompts is required"),
        (["--prompt", "A", "--prompts", "f"], "not allowed with argument"),
        (["--prompt", "A", "--policy", "threshold"], "needs --threshold TAU"),
        (["--prompt", "A", "--threshold", "0.5"], "goes with --policy threshold"),
        (["--prompt", "A", "--no-draft", "--max-draft", "2"], "goes without"),
        (["--prompt", "A", "--logprobs", "2"], "--logprobs goes with --json"),
        (["--prompt", "A", "--threads", "1025"], "must be an integer in [0, 1024], got 1025"),
        (["--prompt", "A", "--threads", "-1"], "must be an integer in [0, 1024], got -1"),
        (["--prompt", "A", "--max-draft", "0"], "must be an integer >= 1, got 0"),
    ],
)
@pytest.mark.usefixtures("no_load")
def test_wrong_usage_is_code_2(tiny: Tiny, capsys: Capture, flags: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as raised:
        run(tiny.drafted, *flags)
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("no_load")
def test_what_the_engine_lacks_is_told_before_it_loads(
    tiny: Tiny, tmp_path: Path, capsys: Capture
) -> None:
    threshold = ["--prompt", "A", "--policy", "threshold", "--threshold", "0.5"]
    for engine, words in (
        (tiny.plain, "the engine has no drafter"),
        (tiny.no_confidence, "needs a confidence head, the engine's drafter has none"),
        (tmp_path / "absent", "absent"),
    ):
        assert run(engine, *threshold) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "flags", "words"),
    [
        ('{"prompt": "x"', [], ":2: not JSON"),
        ('{"prompt": ""}', [], ":2: prompt is empty"),
        ('{"prompt": "%s"}' % ("no way " * 200), [], ":2: Prompt length ("),
        ('{"messages": [{"role": "user", "content": "x"}]}', [], ":2: messages need the chat"),
        ('{"turns": [7]}', ["--chat"], ":2: turns must be a text"),
    ],
)
def test_a_bad_prompt_in_a_batch_is_named_by_its_line(
    tiny: Tiny, tmp_path: Path, capsys: Capture, line: str, flags: list[str], words: str
) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    assert run(tiny.plain, "--prompts", str(path), "--json", str(out), *flags) == 2
    captured = capsys.readouterr()
    assert f"{path.name}{words}" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not out.exists()


def test_too_long_a_prompt_is_refused(tiny: Tiny, capsys: Capture) -> None:
    assert run(tiny.plain, "--prompt", "no way " * 200) == 2
    assert "exceeds maximum input length (127)" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused(tiny: Tiny, capsys: Capture) -> None:
    assert run(tiny.plain, "--prompt", "a\udcff") == 2
    assert "--prompt must be UTF-8 text, got another byte at character 2" in capsys.readouterr().err
    assert single_prompt("a") == Prompt(0, text="a")


def test_a_reader_that_leaves_is_no_error(tiny: Tiny) -> None:
    command = [sys.executable, "-m", "dspark_trt.tools.cli", "generate", str(tiny.plain)]
    child = subprocess.Popen(
        [*command, "--prompt", "A", "--max-tokens", "100", "--ignore-eos", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) == 141
    assert errors == b""


def test_a_terminal_meets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[31m\n\tb\x9b \U0001f469\u200d\U0001f467"
    assert generate.for_terminal(text) == text
    monkeypatch.setattr(generate.sys.stdout, "isatty", lambda: True)
    assert generate.for_terminal(text) == "a?[31m\n\tb? \U0001f469\u200d\U0001f467"


def test_figures_without_time_or_tokens_are_a_dash() -> None:
    assert rate(0, 0.0) == "-"
    assert rate(10, 2.0) == "5.0 tokens/s"
    assert shortened([1] * 24) == " ".join("1" * 24)
