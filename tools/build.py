"""`dspark build`: a checkpoint, and perhaps a drafter, into an engine directory."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dspark_trt.build.paths import check_paths
from dspark_trt.runtime.engine_dir import Manifest, read_manifest
from dspark_trt.tools.options import integer, parser

EXAMPLES = """\
  dspark build --model SmolLM2-135M-Instruct.Q4_1.gguf --output engines/smollm2
  dspark build --model ./Qwen3-4B --drafter ./dspark_qwen3_4b_block7 --output engines/qwen3
  dspark build --model ./Qwen3-4B --quantize int4 --max-seq-len 2048 --output engines/qwen3-int4"""

# Flags of trtllm-build -> what stands for them here; README.md has the whole table.
TRTLLM_RENAMED = {
    "--checkpoint_dir": "--model",
    "--output_dir": "--output",
    "--tokens_per_block": "--page-size",
    "--max_draft_len": "--drafter",
    "--speculative_decoding_mode": "--drafter",
}
TRTLLM_OTHERS = (
    "--kv_cache_type --paged_kv_cache --remove_input_padding --context_fmha --gemm_plugin "
    "--gpt_attention_plugin --multiple_profiles --opt_num_tokens --max_beam_width --tp_size "
    "--pp_size --workers --lora_dir --lora_plugin --max_multimodal_len "
    "--max_prompt_embedding_table_size --weight_streaming --refit --fast_build "
    "--profiling_verbosity"
)


def arguments() -> argparse.ArgumentParser:
    """The options of `dspark build`; the checks of their values are `BuildOptions`'."""
    made = parser(
        "build",
        description="Build an engine directory. It is complete or not there at all: on an error, a "
        "signal or a full disk, what was at DIR stays.",
        examples=EXAMPLES,
    )
    add = made.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="Hugging Face directory, GGUF file, or TensorRT-LLM checkpoint directory",
    )
    add(
        "--drafter",
        type=Path,
        metavar="PATH",
        help="directory of a DSpark drafter made for this model",
    )
    add("--output", type=Path, required=True, metavar="DIR", help="engine directory to write")
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="directory of the tokenizer, where the model brings none",
    )
    add("--backend", default="onnxruntime", choices=["onnxruntime"], help="default: %(default)s")
    add("--dtype", default="float32", choices=["float32"], help="default: %(default)s")
    add(
        "--quantize",
        default="none",
        choices=["none", "int8", "int4"],
        help="weight-only quantisation, default: %(default)s",
    )
    add(
        "--perplexity-text",
        type=Path,
        metavar="FILE",
        help="text that quantisation is measured on, default: one that comes with dspark",
    )
    add_limits(made)
    add("--gather-context-logits", action="store_true", help="keep the logits of prompts")
    add("--gather-generation-logits", action="store_true", help="keep the logits of outputs")
    return made


def add_limits(made: argparse.ArgumentParser) -> None:
    """The options that bound what the engine takes, all in tokens or requests."""
    for flag, default, text in (
        ("--max-batch-size", 8, "requests that run at once"),
        ("--max-input-len", None, "tokens of a prompt, default: one less than --max-seq-len"),
        (
            "--max-seq-len",
            None,
            "tokens of prompt and output together, default: the checkpoint's, at most 4096",
        ),
        ("--max-num-tokens", 512, "tokens of one step over all requests"),
        ("--page-size", 32, "tokens of a KV page"),
    ):
        shown = text if default is None else f"{text}, default: {default}"
        made.add_argument(flag, type=integer(1), default=default, metavar="N", help=shown)


def flag_hint(argv: Sequence[str], known: Collection[str]) -> str | None:
    """What to give instead of the first flag that is spelled as trtllm-build's; None: no such."""
    for flag in (word.split("=", 1)[0] for word in argv if word.startswith("--")):
        dashed = flag.replace("_", "-")
        if flag in TRTLLM_RENAMED:
            return f"unrecognized argument {flag}: did you mean {TRTLLM_RENAMED[flag]}?"
        if flag in TRTLLM_OTHERS.split():
            return f"unrecognized argument {flag}: see the table of trtllm-build in README.md"
        if dashed != flag and dashed in known:
            return f"unrecognized argument {flag}: did you mean {dashed}?"
    return None


def main(argv: Sequence[str]) -> int:
    """Run `dspark build`; the exit code."""
    made = arguments()
    # Before argparse, which would first miss the required flags that these stand for.
    if hint := flag_hint(argv, re.findall("--[a-z-]+", made.format_usage())):
        made.error(hint)
    asked = vars(made.parse_args(argv))
    inputs = {f"--{name}": asked[name] for name in ("model", "drafter", "tokenizer")}
    check_paths(asked["output"], inputs)  # before the libraries load: a slip is told at once

    from dspark_trt.build.builder import BuildOptions, build_engine

    started = time.monotonic()
    bar = ProgressBar()
    try:
        build_engine(BuildOptions(**asked), bar.show, bar.say)
    finally:
        bar.close()
    manifest = read_manifest(asked["output"])
    print(summary(asked["output"], manifest, time.monotonic() - started))
    return 0


def summary(output: Path, manifest: Manifest, seconds: float) -> str:
    """One line on what was built."""
    size = sum(entry.bytes for entry in manifest.files.values())
    drafter = " with its drafter" if manifest.drafter is not None else ""
    quantized = "" if manifest.quantize == "none" else f", {manifest.quantize} weights"
    return (
        f"built {output}: {manifest.checkpoint.name}{drafter} for {manifest.backend} "
        f"({manifest.dtype}{quantized}), {size / 1e6:.0f} MB in {seconds:.1f} s"
    )


class ProgressBar:
    """Bytes of weights written, on stderr; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._visible = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, done: int, total: int, tensor: str) -> None:
        """Draw `done` of `total` bytes, the last of them of `tensor`."""
        if not self._visible:
            return
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="weights", leave=False)
        if done < self._bar.n:  # quantisation reads the weights again
            self._bar.reset()
        self._bar.update(done - self._bar.n)
        self._bar.set_postfix_str(tensor[-32:], refresh=False)

    def say(self, line: str) -> None:
        """A line of its own, on stderr."""
        self.close()
        print(line, file=sys.stderr)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
