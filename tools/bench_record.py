"""A benchmark as JSON: where it comes from, what was asked for, every figure of every round."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt.build.checkpoint import CheckpointError, open_target
from dspark_trt.build.config import ConfigError
from dspark_trt.runtime.engine_dir import Manifest
from dspark_trt.tools.bench_report import (
    OURS,
    PLAIN,
    accepted_by_position,
    agreement,
    figures,
    ratios,
)
from dspark_trt.tools.bench_runs import ArmResult
from dspark_trt.tools.peers import PEERS
from dspark_trt.tools.prompts import Prompt
from dspark_trt.tools.provenance import provenance

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """What a benchmark was asked for."""

    asked: argparse.Namespace
    argv: Sequence[str]
    manifest: Manifest
    prompts: Sequence[Prompt]
    same_checkpoint: bool | None  # whether --compare-model is what the engine was built from


def record_of(setup: Setup, results: Sequence[ArmResult]) -> dict[str, Any]:
    """The JSON record: provenance, engine, settings, results, ratios, agreement."""
    asked, manifest = setup.asked, setup.manifest
    peers = [PEERS[name] for name in asked.compare]
    plain = next(r for r in results if r.name == PLAIN)
    lines = [prompt.line for prompt in setup.prompts]
    libraries = [library for peer in peers for library in peer.libraries]
    return {
        "schema": SCHEMA,
        **provenance(["bench", *setup.argv], libraries),
        "builds": {peer.name: peer.build() for peer in peers},
        "engine": engine_json(manifest),
        "settings": settings_json(setup),
        "results": results_json(results),
        "ratios": ratios(results, [peer.name for peer in peers]),
        "agreement": [agreement(plain, r, lines) for r in results if r is not plain],
    }


def results_json(results: Sequence[ArmResult]) -> list[dict[str, Any]]:
    """Every arm's medians and all its samples."""
    return [
        {
            "arm": result.name,
            "batch_size": result.batch_size,
            **figures(result),
            "accepted_by_position": accepted_by_position(result),
            "samples": [dataclasses.asdict(sample) for sample in result.samples],
        }
        for result in results
    ]


def engine_json(manifest: Manifest) -> dict[str, Any]:
    """Which engine was measured."""
    drafter = manifest.drafter_checkpoint
    return {
        "hash": manifest.engine_hash,
        "model": manifest.checkpoint.name,
        "drafter": drafter.name if drafter else None,
        "backend": manifest.backend,
        "dtype": manifest.dtype,
        "quantize": manifest.quantize,
    }


def settings_json(setup: Setup) -> dict[str, Any]:
    """How it was measured."""
    asked = setup.asked
    policy = asked.policy or "static"
    return {
        "prompts": len(setup.prompts),
        **{name: getattr(asked, name) for name in ("max_tokens", "ignore_eos", "chat")},
        **{name: getattr(asked, name) for name in ("repeat", "threads", "threshold", "max_draft")},
        "policy": policy if setup.manifest.drafter is not None else None,
        "compare_model": asked.compare_model.name if asked.compare_model else None,
        "same_checkpoint": setup.same_checkpoint,
        "weights": weights_json(setup),
    }


def weights_json(setup: Setup) -> dict[str, str]:
    """What each runtime holds its weights in: arm (`OURS` for this engine's) -> type."""
    asked, manifest = setup.asked, setup.manifest
    ours = manifest.dtype if manifest.quantize == "none" else manifest.quantize
    peers = [PEERS[name] for name in asked.compare]
    return {OURS: ours, **{peer.name: peer.weights(asked.compare_model) for peer in peers}}


def same_checkpoint(model: Path, manifest: Manifest) -> bool:
    """Whether the engine was built from the very files at `model`."""
    try:
        return open_target(model).content_hash == manifest.checkpoint.content_hash
    except (CheckpointError, ConfigError):  # no engine can be built from what is not read
        return False
