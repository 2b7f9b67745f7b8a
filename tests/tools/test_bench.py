"""`dspark bench` on tiny engines: figures, files, other runtimes, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_engines import Tiny
from gguf import GGMLQuantizationType
from gguf_targets import tiny_gguf
from tiny_engine import tiny_engine

from dspark_trt.runtime import llm as llm_module
from dspark_trt.tools import extras
from dspark_trt.tools.bench_runs import Sample
from dspark_trt.tools.cli import main
from dspark_trt.tools.peers import check_peer

Capture = pytest.CaptureFixture[str]
SHORT = ("--threads", "1", "--max-tokens", "16", "--repeat", "2", "--chat")


def run(engine: Path, prompts: Path, *flags: str) -> int:
    return main(["bench", str(engine), "--prompts", str(prompts), *SHORT, *flags])


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an engine is loaded."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine was loaded")

    monkeypatch.setattr(llm_module.LLM, "__init__", load)


def test_both_arms_are_measured_at_every_batch_size(
    tiny: Tiny, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, image = tmp_path / "out.json", tmp_path / "out.png"
    flags = ["--batch-size", "2,1", "--json", str(out), "--plot", str(image)]
    assert run(tiny.drafted, prompts, *flags) == 0
    text = capsys.readouterr().out
    record = json.loads(out.read_text())
    arms = [(r["arm"], r["batch_size"]) for r in record["results"]]
    assert arms == [("static", 1), ("no drafts", 1), ("static", 2), ("no drafts", 2)]
    for result in record["results"]:
        assert len(result["samples"]) == 2
        assert result["decode_tokens_per_s"]["min"] > 0
        assert result["prefill_tokens_per_s"]["median"] > 0
        for sample in result["samples"]:
            assert sample.keys() == Sample.__dataclass_fields__.keys()
            assert sample["decode_tokens"] == 3 * 15
    static, plain = record["results"][:2]
    assert static["mean_accepted_length"]["median"] > 1.2
    assert static["draft_ms_per_step"]["median"] > 0
    assert static["accepted_by_position"][0] > static["accepted_by_position"][3]
    assert plain["mean_accepted_length"]["median"] == 1
    assert plain["draft_ms_per_step"]["median"] == 0
    assert [(a["equal"], a["prompts"]) for a in record["agreement"]] == [(3, 3)] * 3
    assert image.read_bytes().startswith(b"\x89PNG")
    for words in ("no drafts", "static x1 / no drafts x1:", "accepted up to position, static x2"):
        assert words in text


def test_the_record_says_where_it_comes_from(tiny: Tiny, prompts: Path, capsys: Capture) -> None:
    flags = ["--num-prompts", "1", "--policy", "threshold", "--threshold", "0.2", "--json", "-"]
    assert run(tiny.drafted, prompts, *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == 1
    assert record["command"].startswith("dspark bench ")
    assert record["command"].endswith("--threshold 0.2 --json -")
    assert {"python", "dspark-trt", "onnxruntime"} <= record["versions"].keys()
    assert record["machine"]["cpu"]
    assert record["machine"]["cores"] >= record["machine"]["usable_cores"] >= 1
    assert len(record["engine"]["hash"]) == 64
    assert record["settings"]["policy"] == "threshold"
    assert record["settings"]["prompts"] == 1
    assert [r["arm"] for r in record["results"]] == ["threshold", "no drafts"]


def test_an_engine_without_drafter_has_one_arm(tiny: Tiny, prompts: Path, capsys: Capture) -> None:
    assert run(tiny.plain, prompts) == 0
    out = capsys.readouterr().out
    assert "static" not in out
    assert "no drafts" in out


def test_transformers_gives_the_same_texts(tiny: Tiny, prompts: Path, capsys: Capture) -> None:
    flags = ["--compare", "transformers", "--compare-model", str(tiny.target)]
    assert run(tiny.drafted, prompts, *flags) == 0
    out = capsys.readouterr().out
    assert "greedy texts, transformers x1 and no drafts x1: 3 of 3 equal" in out
    for arm in ("static x1", "no drafts x1"):
        words = f"decode speed, {arm} (float32 weights) / transformers x1 (float32 weights):"
        assert words in out
    assert "is not the checkpoint" not in out


def test_llama_cpp_runs_beside_its_own_gguf(tmp_path: Path, capsys: Capture) -> None:
    model = tiny_gguf(tmp_path)
    engine = tiny_engine(tmp_path / "engine", model)
    path = tmp_path / "plain.jsonl"
    path.write_text('{"prompt": "The river"}\n{"prompt": "A boat"}\n')
    peer_flags = ["--compare", "llamacpp", "--compare-model", str(model), "--json", "-"]
    flags = ["--prompts", str(path), "--threads", "1", "--max-tokens", "8", *peer_flags]
    assert main(["bench", str(engine), *flags]) == 0
    record = json.loads(capsys.readouterr().out)
    peer = record["results"][-1]
    assert peer["arm"] == "llama.cpp"
    assert peer["decode_tokens_per_s"]["min"] > 0
    assert record["settings"]["same_checkpoint"] is True
    assert record["settings"]["weights"].keys() == {"engine", "llama.cpp"}
    assert record["settings"]["weights"]["llama.cpp"] in [t.name for t in GGMLQuantizationType]
    assert record["agreement"][0]["prompts"] == 2
    assert "CPU" in record["builds"]["llama.cpp"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-size", "4"], "--batch-size must be <= 3 (the engine's max_batch_size, or"),
        (["--plot", "x.txt"], "--plot x.txt must end in one of .png, .svg, .pdf"),
        (["--json", "absent/x.json"], "there is no directory"),
        (["--compare", "transformers"], "--compare transformers needs --compare-model"),
        (["--compare", "llamacpp", "--compare-model", "absent"], "no such directory or .gguf"),
        (["--compare", "llamacpp", "--compare-model", "."], "needs a .gguf file"),
        (["--policy", "threshold", "--threshold", "-1"], "threshold must be in [0, 1], got -1.0"),
    ],
)
@pytest.mark.usefixtures("no_load")
def test_what_cannot_be_measured_is_one_line_and_code_2(
    tiny: Tiny, prompts: Path, capsys: Capture, flags: list[str], words: str
) -> None:
    assert run(tiny.drafted, prompts, *flags) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert out == ""


def test_wrong_usage_is_code_2(tiny: Tiny, prompts: Path, capsys: Capture) -> None:
    for flags, words in (
        (["--compare-model", "x"], "--compare-model goes with --compare"),
        (["--compare", "vllm"], "invalid choice: 'vllm'"),
        (["--batch-size", "1,0"], "must be an integer >= 1, got 0"),
        (["--batch-size", "1,"], "must be an integer >= 1, got ''"),
        (["--threads", "1025"], "must be an integer in [1, 1024], got 1025"),
        (["--repeat", "0"], "must be an integer >= 1, got 0"),
        (["--max-tokens", "1"], "must be an integer >= 2, got 1"),
    ):
        with pytest.raises(SystemExit) as raised:
            run(tiny.drafted, prompts, *flags)
        assert raised.value.code == 2
        assert words in capsys.readouterr().err


def test_a_missing_library_says_how_to_get_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(extras.importlib, "import_module", missing)
    with pytest.raises(extras.MissingExtraError, match=r"--plot needs matplotlib.*\[plot\]"):
        extras.load_extra("matplotlib", extra="plot", wanted_by="--plot")
    with pytest.raises(extras.MissingExtraError, match=r"transformers needs torch.*\[bench\]"):
        check_peer("transformers", tiny.target)


def test_a_model_that_the_peer_cannot_load_is_one_line(
    tiny: Tiny, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = ["--compare", "transformers", "--compare-model", str(tmp_path)]
    assert run(tiny.plain, prompts, *flags) == 2
    err = capsys.readouterr().err
    assert "transformers cannot load --compare-model" in err
    assert err.count("\n") == 1
