"""`dspark generate`: complete one prompt as a stream, or a file of prompts as one batch."""

from __future__ import annotations

import argparse
import io
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.runtime.engine_dir import Manifest, read_manifest
from dspark_trt.runtime.sampling_params import SamplingParams
from dspark_trt.tools.answers import json_line, summary
from dspark_trt.tools.encode import encode_prompts, single_prompt
from dspark_trt.tools.options import MAX_THREADS, integer, parser
from dspark_trt.tools.output_files import STDOUT, check_output_file, write_output
from dspark_trt.tools.policies import (
    add_policy_options,
    check_policy_options,
    policy_for,
)
from dspark_trt.tools.progress import progress_bar
from dspark_trt.tools.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from dspark_trt.runtime.llm import LLM, Completion

EXAMPLES = """\
  dspark generate engines/smollm2 --chat --prompt "Why is the sky blue?"
  dspark generate engines/smollm2 --prompt "Once upon a time" --temperature 0.8 --seed 7 --n 3
  dspark generate engines/qwen3 --prompts questions.jsonl --chat --json answers.jsonl
  dspark generate engines/qwen3 --chat --prompt Hi --policy threshold --threshold 0.4"""
HEADER_CHARACTERS = 60


def arguments() -> argparse.ArgumentParser:
    """The options of `dspark generate`; bounds of sampling are checked by `SamplingParams`."""
    made = parser(
        "generate",
        description="Complete one prompt as a stream, or a file of prompts as one batch. Text goes "
        "to stdout, figures to stderr.",
        examples=EXAMPLES,
    )
    add = made.add_argument
    add("engine", type=Path, metavar="DIR", help="engine directory")
    given = made.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="one prompt")
    given.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="one JSON object a line, with prompt, turns or messages",
    )
    add("--chat", action="store_true", help="apply the model's chat template")
    add(
        "--json",
        metavar="OUT.jsonl",
        help="write answers as JSON lines; - = to stdout, instead of text",
    )
    add(
        "--threads",
        type=integer(0, MAX_THREADS),
        default=0,
        metavar="N",
        help="0 = one per core (default)",
    )
    _add_sampling(made.add_argument_group("sampling"))
    add("--no-draft", action="store_true", help="decode without the drafter")
    add_policy_options(made)
    return made


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    defaults = SamplingParams()
    for name, kind, letter, text in (
        ("max_tokens", int, "N", "new tokens at most"),
        ("temperature", float, "T", "0 = the likeliest token"),
        ("draft_temperature", float, "T", "of the drafts; default: --temperature"),
        ("top_k", int, "K", "0 = off"),
        ("top_p", float, "P", "in (0, 1], 1 = off"),
        ("min_p", float, "P", "in [0, 1], 0 = off"),
        ("repetition_penalty", float, "X", "> 0, 1 = off"),
        ("presence_penalty", float, "X", "0 = off"),
        ("frequency_penalty", float, "X", "0 = off"),
        ("seed", int, "S", "of the random numbers"),
        ("n", int, "N", "answers to each prompt"),
        ("logprobs", int, "N", "log-probabilities of the N likeliest tokens, in --json"),
    ):
        default = getattr(defaults, name)
        shown = "" if default is None else f", default: {default:g}"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=default, metavar=letter, help=text + shown)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="S",
        help="end before such text; may be given several times",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, refused as wrong usage where they do not go together."""
    made = arguments()
    asked = made.parse_args(argv)
    check_policy_options(made, asked)
    if asked.logprobs is not None and asked.json is None:
        made.error("--logprobs goes with --json")
    return asked


def main(argv: Sequence[str]) -> int:
    """Run `dspark generate`; the exit code. What can be refused is refused before the load."""
    asked = parse(argv)
    given = {f.name: getattr(asked, f.name) for f in fields(SamplingParams) if f.name in asked}
    params = SamplingParams(**given)
    check_output_file(asked.json)
    one, file = asked.prompt, asked.prompts
    prompts = [single_prompt(one)] if file is None else read_prompts(file)
    manifest = read_manifest(asked.engine)
    policy = policy_for(asked, manifest)

    from dspark_trt.runtime.llm import LLM

    llm = LLM(asked.engine, policy=policy, threads=asked.threads)
    encoded = encode_prompts(llm, prompts, chat=asked.chat, file=file)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know fewer characters
    streamed, quiet = file is None and params.n == 1, asked.json == STDOUT
    if streamed:
        completions = [stream(llm, encoded[0], params, quiet=quiet)]
    else:
        completions = batch(llm, encoded, params)
    each = [prompt for prompt in prompts for _ in range(params.n)]
    if asked.json is not None:
        lines = "".join(map(json_line, each, completions))
        write_output(asked.json, lines.encode("utf-8"))
    if not streamed and not quiet:
        show_answers(each, completions)
    reason = why_one_token(manifest, no_draft=asked.no_draft)
    print(summary(completions, llm.engine.metrics, why_one=reason), file=sys.stderr)
    if cut := cut_by_context(completions, params, manifest):
        print(cut, file=sys.stderr)
    return 0


def cut_by_context(
    completions: Sequence[Completion], params: SamplingParams, manifest: Manifest
) -> str | None:
    """What to say where answers ended before --max-tokens because the context did."""
    cut = sum(
        c.finish_reason == "length" and len(c.token_ids) < params.max_tokens for c in completions
    )
    if not cut:
        return None
    which = "" if len(completions) == 1 else f"{cut} of {len(completions)} answers "
    longest = manifest.limits.max_seq_len
    return f"{which}stopped at the context's end, max_seq_len {longest}, before --max-tokens"


def why_one_token(manifest: Manifest, *, no_draft: bool) -> str | None:
    """Why every step gives one token; None where drafts are verified."""
    if manifest.drafter is None:
        return "this engine has no drafter"
    return "drafting is off (--no-draft)" if no_draft else None


def stream(llm: LLM, prompt: list[int], params: SamplingParams, *, quiet: bool) -> Completion:
    """Complete one prompt, with the text on stdout as it comes unless `quiet`."""
    completion = None
    for delta in llm.stream(prompt, params):
        if not quiet:
            sys.stdout.write(for_terminal(delta.text))
            sys.stdout.flush()
        completion = delta.completion
    assert completion is not None
    if not quiet:
        print(flush=True)
    return completion


def batch(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    """Complete all prompts together, with a bar of finished answers where stderr is a terminal."""
    with progress_bar(len(prompts) * params.n, "answer") as bar:
        return llm.generate(prompts, params, progress=lambda done, _: bar.update(done - bar.n))


def show_answers(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
    """Each answer under a line that says which it is."""
    for i, (prompt, completion) in enumerate(zip(prompts, completions), 1):
        asked = prompt.text if prompt.text is not None else str(prompt.messages[-1]["content"])
        start = " ".join(asked.split())[:HEADER_CHARACTERS]
        line = f"line {prompt.line}, " if prompt.line else ""
        print(f"--- {i} of {len(completions)} ({line}{completion.finish_reason}): {start}")
        print(for_terminal(completion.text))


def for_terminal(text: str) -> str:
    """`text`, and on a terminal without the control characters that would steer it."""
    if not sys.stdout.isatty():
        return text
    kept = "\n\t"
    return "".join(c if c in kept or unicodedata.category(c) != "Cc" else "?" for c in text)
