"""`dspark info`: what an engine directory holds, from its manifest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_trt.runtime.engine_dir import EngineDir, Manifest, open_engine_dir
from dspark_trt.runtime.typed_json import JsonError, read_json
from dspark_trt.tools.options import parser

EXAMPLES = """\
  dspark info engines/smollm2
  dspark info engines/smollm2 --json | jq .engine_hash"""
# Made after the build; each names the engine it belongs to.
LATER_FILES = ("sts.json", "cost_table.json")
ABSENT = "absent"
MAX_LATER_BYTES = 16 << 20


def arguments() -> argparse.ArgumentParser:
    """The options of `dspark info`."""
    made = parser(
        "info",
        description="Show what an engine directory holds: model, limits, versions, files.",
        examples=EXAMPLES,
    )
    made.add_argument("engine", type=Path, metavar="DIR", help="engine directory")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--verify", action="store_true", help="check the hash of every file, not only its size"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Run `dspark info`; the exit code."""
    asked = arguments().parse_args(argv)
    engine = open_engine_dir(asked.engine, verify="hash" if asked.verify else "size")
    if asked.json:
        print(json.dumps(as_json(engine), indent=2))
    else:
        print(as_text(engine, verified=asked.verify))
    return 0


def as_json(engine: EngineDir) -> dict[str, Any]:
    """The manifest, and what follows from it."""
    manifest = engine.manifest
    return {
        **manifest.to_json(),
        "engine_hash": manifest.engine_hash,
        "total_bytes": total_bytes(manifest),
        "kv_bytes_per_token": kv_bytes_per_token(manifest),
        "made_later": later_files(engine),
    }


def as_text(engine: EngineDir, *, verified: bool) -> str:
    """A table of names and values, then the files."""
    rows = [*what_it_is(engine), *what_it_allows(engine.manifest), *where_from(engine.manifest)]
    rows += [(name, text) for name, text in later_files(engine).items() if text != ABSENT]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:{width}}{value}" for name, value in rows]
    entries = sorted(engine.manifest.files.items())
    column = max((len(name) for name, _ in entries), default=0)
    checked = "sizes and hashes checked" if verified else "sizes checked"
    lines += ["", f"files ({checked})"]
    lines += [f"  {name:{column}}  {size(e.bytes):>9}  {e.sha256[:16]}" for name, e in entries]
    lines += [f"  {'total':{column}}  {size(total_bytes(engine.manifest)):>9}"]
    return "\n".join(lines)


def what_it_is(engine: EngineDir) -> list[tuple[str, str]]:
    """Rows on the model, the drafter and the arithmetic."""
    manifest = engine.manifest
    rows = [
        ("engine", str(engine.path)),
        ("engine hash", manifest.engine_hash),
        ("backend", f"{manifest.backend}, {manifest.dtype}, quantize {manifest.quantize}"),
        ("model", f"{source(manifest.checkpoint)}: {dims(manifest.target)}"),
    ]
    if manifest.drafter is None or manifest.drafter_checkpoint is None:
        rows.append(("drafter", "none"))
    else:
        drafter = manifest.drafter
        head = f"{drafter.get('markov_head_type')} head of rank {drafter.get('markov_rank')}"
        rows += [
            ("drafter", f"{source(manifest.drafter_checkpoint)}: {dims(drafter)}"),
            (
                "",
                f"block {drafter.get('block_size')}, "
                f"{head if drafter.get('markov_rank') else 'no sequential head'}, "
                f"{'confidence head' if drafter.get('confidence_head') else 'no confidence head'}",
            ),
        ]
    return rows


def what_it_allows(manifest: Manifest) -> list[tuple[str, str]]:
    """Rows on limits, tiers and memory."""
    limits = manifest.limits
    kept = [
        name
        for name, on in (
            ("context", manifest.gather_context_logits),
            ("generation", manifest.gather_generation_logits),
        )
        if on
    ]
    return [
        (
            "limits",
            f"{limits.max_batch_size} requests, prompt {limits.max_input_len}, "
            f"sequence {limits.max_seq_len}, step {limits.max_num_tokens} tokens",
        ),
        ("tiers", ", ".join(map(str, manifest.tiers)) or "any (dynamic shapes)"),
        (
            "KV cache",
            f"pages of {manifest.page_size} tokens, {size(kv_bytes_per_token(manifest))} a token",
        ),
        ("logits kept", " and ".join(kept) or "none"),
    ]


def where_from(manifest: Manifest) -> list[tuple[str, str]]:
    """Rows on versions, date and GPU."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
    rows = [
        ("built", f"{manifest.created} by dspark {manifest.dspark_version}"),
        ("with", versions),
    ]
    if manifest.gpu is not None:
        rows.append(("GPU", f"{manifest.gpu.name} (sm {manifest.gpu.compute_capability})"))
    return [*rows, *measured(manifest)]


def measured(manifest: Manifest) -> list[tuple[str, str]]:
    """Rows on what quantisation cost, and on what else was measured at build."""
    values = dict(manifest.measured)
    before = values.pop("perplexity_float32", None)
    after = values.pop(f"perplexity_{manifest.quantize}", None)
    rows = []
    if before and after is not None:
        tokens = values.pop("perplexity_tokens", None)
        on = "" if tokens is None else f", on {tokens:.0f} tokens"
        text = f"{before:.3f} in float32, {after:.3f} in {manifest.quantize}"
        rows.append(("perplexity", f"{text} ({after / before - 1:+.1%}{on})"))
        wide = values.pop("matrices_in_8_bits", None)
        if wide is not None and manifest.quantize == "int4":
            rows.append(("wider", f"{wide:.0f} matrices in 8 bits, the rest in 4"))
    elif before is not None:
        rows.append(("perplexity", f"{before:.3f} in float32"))
    return [*rows, *((name.replace("_", " "), f"{value:g}") for name, value in values.items())]


def source(checkpoint: Any) -> str:
    """Name and kind of a checkpoint."""
    return f"{checkpoint.name} ({checkpoint.format}, {checkpoint.weight_dtype})"


def dims(value: dict[str, Any]) -> str:
    """The dims of a target or a drafter on one line."""
    layer = value.get("layer", {})
    return (
        f"{value.get('family', 'dspark')}, {value.get('num_layers')} layers, "
        f"hidden {layer.get('hidden_size')}, heads {layer.get('num_heads')}/"
        f"{layer.get('num_kv_heads')} of {layer.get('head_dim')}, vocab {value.get('vocab_size')}"
    )


def kv_bytes_per_token(manifest: Manifest) -> int:
    """Bytes of K and V that one token takes in all layers of target and drafter together."""
    width = {"float32": 4}.get(manifest.dtype, 2)
    total = 0
    for value in (manifest.target, manifest.drafter or {}):
        layer: Any = value.get("layer", {})
        per_layer = 2 * layer.get("num_kv_heads", 0) * layer.get("head_dim", 0)
        total += int(value.get("num_layers", 0)) * per_layer * width  # type: ignore[call-overload]
    return total


def total_bytes(manifest: Manifest) -> int:
    """Bytes of all listed files."""
    return sum(entry.bytes for entry in manifest.files.values())


def later_files(engine: EngineDir) -> dict[str, str]:
    """Whether each file made after the build is there and belongs to this engine."""
    states = {}
    for name in LATER_FILES:
        try:
            value = read_json(engine.path / name, max_bytes=MAX_LATER_BYTES)
        except FileNotFoundError:
            states[name] = ABSENT
        except (OSError, JsonError):
            states[name] = "unreadable"
        else:
            made_for = value.get("engine_hash") if isinstance(value, dict) else None
            ours = made_for == engine.manifest.engine_hash
            states[name] = "of this engine" if ours else "of another engine"
    return states


def size(count: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
