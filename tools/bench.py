"""`dspark bench`: an engine's speed with and without its drafter, and beside other runtimes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.runtime.engine_dir import Manifest, read_manifest
from dspark_trt.runtime.sampling_params import refuse
from dspark_trt.tools import bench_report
from dspark_trt.tools.bench_runs import EngineArm, measure
from dspark_trt.tools.encode import encode_prompts
from dspark_trt.tools.extras import load_extra
from dspark_trt.tools.options import MAX_THREADS, integer, integers, parser
from dspark_trt.tools.output_files import STDOUT, OutputError, check_output_file, write_output
from dspark_trt.tools.peers import PEERS, PeerArm, PeerJob, check_peer
from dspark_trt.tools.policies import add_policy_options, check_policy_options, policy_for
from dspark_trt.tools.progress import progress_bar
from dspark_trt.tools.prompts import read_prompts
from dspark_trt.tools.provenance import usable_cores

if TYPE_CHECKING:
    from dspark_trt.runtime.budget import Policy
    from dspark_trt.runtime.llm import LLM
    from dspark_trt.tools.bench_record import Setup
    from dspark_trt.tools.bench_runs import Arm, ArmResult

EXAMPLES = """\
  dspark bench engines/qwen3 --prompts questions.jsonl --chat --num-prompts 16
  dspark bench engines/smollm2 --prompts p.jsonl --batch-size 1,8 --json out.json --plot out.png
  dspark bench engines/smollm2 --prompts p.jsonl --compare llamacpp --compare-model m.gguf"""
IMAGES = (".png", ".svg", ".pdf")


def arguments() -> argparse.ArgumentParser:
    """The options of `dspark bench`."""
    made = parser(
        "bench",
        description="Measure greedy decoding with and without the drafter on the same prompts, in "
        "interleaved rounds; medians and spread.",
        examples=EXAMPLES,
    )
    add = made.add_argument
    add("engine", type=Path, metavar="DIR", help="engine directory")
    add("--prompts", type=Path, required=True, metavar="FILE.jsonl", help="as of dspark generate")
    add("--num-prompts", type=integer(1), metavar="N", help="the first N, default: all")
    add("--max-tokens", type=integer(2), default=128, metavar="N", help="default: %(default)s")
    add(
        "--batch-size",
        type=integers(1),
        default=[1],
        metavar="B[,B]",
        help="prompts at once, default: 1; several, as 1,8, are measured one by one",
    )
    add("--chat", action="store_true", help="apply the model's chat template")
    add("--ignore-eos", action="store_true", help="let every answer have --max-tokens tokens")
    add("--repeat", type=integer(1), default=3, metavar="R", help="rounds, default: %(default)s")
    add(
        "--threads",
        type=integer(1, MAX_THREADS),
        default=usable_cores(),
        metavar="N",
        help="default: %(default)s",
    )
    add_policy_options(made)
    add(
        "--compare",
        action="append",
        default=[],
        choices=sorted(PEERS),
        help="another runtime on the same prompts, one at a time; may be given twice",
    )
    add("--compare-model", type=Path, metavar="PATH", help="its Hugging Face directory or GGUF")
    add("--json", metavar="OUT", help="write all figures as JSON; - = to stdout, instead of text")
    add("--plot", metavar="OUT.png", help="draw them (.png, .svg or .pdf)")
    return made


def main(argv: Sequence[str]) -> int:
    """Run `dspark bench`; the exit code. What can be refused is refused before the load."""
    made = arguments()
    asked = made.parse_args(argv)
    check_policy_options(made, asked)
    if asked.compare_model is not None and not asked.compare:
        made.error("--compare-model goes with --compare")
    manifest = read_manifest(asked.engine)
    policy = policy_for(asked, manifest)
    prompts = read_prompts(asked.prompts)[: asked.num_prompts]
    check(asked, manifest, len(prompts))

    from dspark_trt.tools.bench_record import Setup, same_checkpoint

    model = asked.compare_model
    same = same_checkpoint(model, manifest) if model is not None else None

    from dspark_trt.runtime.llm import LLM

    llm = LLM(asked.engine, threads=asked.threads)
    encoded = encode_prompts(llm, prompts, chat=asked.chat, file=asked.prompts)
    arms = [*engine_arms(asked, llm, policy, encoded), *peer_arms(asked, llm, encoded)]
    results = measured(arms, asked.repeat)
    report(Setup(asked, argv, manifest, prompts, same), results)
    return 0


def check(asked: argparse.Namespace, manifest: Manifest, prompts: int) -> None:
    """Refuse what cannot be measured or written, and extras that are not installed."""
    limit = min(manifest.limits.max_batch_size, prompts)
    for size in asked.batch_size:
        if size > limit:
            bound = f"<= {limit} (the engine's max_batch_size, or the number of prompts)"
            raise refuse("--batch-size", size, bound, "lower it, or give more prompts")
    check_output_file(asked.json)
    if asked.plot is not None:
        if Path(asked.plot).suffix not in IMAGES:
            raise OutputError(f"--plot {asked.plot} must end in one of {', '.join(IMAGES)}")
        check_output_file(asked.plot)
        load_extra("matplotlib", extra="plot", wanted_by="--plot")
    for name in asked.compare:
        check_peer(name, asked.compare_model)


def engine_arms(
    asked: argparse.Namespace, llm: LLM, policy: Policy, prompts: list[list[int]]
) -> list[Arm]:
    """This engine with drafts (where it has a drafter) and without, at every batch size."""
    from dspark_trt.runtime.budget import NoDraft

    policies: dict[str, Policy] = {bench_report.PLAIN: NoDraft()}
    if llm.manifest.drafter is not None:
        policies = {policy.name: policy, **policies}
    return [
        EngineArm(name, size, llm, one, prompts, asked.max_tokens, asked.ignore_eos)
        for size in sorted(set(asked.batch_size))
        for name, one in policies.items()
    ]


def peer_arms(asked: argparse.Namespace, llm: LLM, prompts: list[list[int]]) -> list[Arm]:
    """The runtimes to compare with, loaded."""
    job = PeerJob(
        model=asked.compare_model,
        threads=asked.threads,
        context=max(map(len, prompts)) + asked.max_tokens + 8,
        eos_token_ids=() if asked.ignore_eos else llm.eos_token_ids,
        decode=llm.tokenizer.decode,
    )
    names = dict.fromkeys(asked.compare)
    return [PeerArm(PEERS[name](job), prompts, asked.max_tokens) for name in names]


def measured(arms: Sequence[Arm], repeat: int) -> list[ArmResult]:
    """All arms' results, with a bar of runs on the way."""
    with progress_bar(len(arms) * repeat, "run") as bar:
        return measure(arms, repeat, bar.set_description, lambda: bar.update(1))


def report(setup: Setup, results: Sequence[ArmResult]) -> None:
    """Write the JSON and the plot that were asked for, and print the rest."""
    from dspark_trt.tools.bench_record import record_of

    asked, manifest = setup.asked, setup.manifest
    record = record_of(setup, results)
    if asked.json is not None:
        data = json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        write_output(asked.json, data.encode("utf-8"))
    if asked.plot is not None:
        kind = Path(asked.plot).suffix[1:]
        write_output(asked.plot, bench_report.plot(results, manifest.checkpoint.name, kind))
    if asked.json != STDOUT:
        print(headline(asked, manifest, len(setup.prompts)), end="\n\n")
        print(bench_report.text(record, results))


def headline(asked: argparse.Namespace, manifest: Manifest, prompts: int) -> str:
    """One line on what was measured."""
    return (
        f"{manifest.checkpoint.name} ({manifest.dtype}, quantize {manifest.quantize}), "
        f"{asked.threads} threads, {prompts} prompts of {asked.max_tokens} new tokens at most, "
        f"{asked.repeat} rounds"
    )
