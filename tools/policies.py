"""The options that say how much is verified, and the policy that they come to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dspark_trt.tools.options import integer

if TYPE_CHECKING:
    from dspark_trt.runtime.budget import Policy
    from dspark_trt.runtime.engine_dir import Manifest

POLICIES = ("static", "threshold")


def add_policy_options(made: argparse.ArgumentParser) -> None:
    """Add `--policy`, `--threshold` and `--max-draft`."""
    made.add_argument(
        "--policy",
        choices=POLICIES,
        help="static: verify the whole block (default); threshold: up to the first draft whose "
        "confidence is below --threshold",
    )
    made.add_argument("--threshold", type=float, metavar="TAU", help="in [0, 1]")
    made.add_argument(
        "--max-draft", type=integer(1), metavar="N", help="verify N drafts a step at most"
    )


def check_policy_options(made: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Refuse, as wrong usage, options that do not go together."""
    if asked.policy == "threshold" and asked.threshold is None:
        made.error("--policy threshold needs --threshold TAU")
    if asked.policy != "threshold" and asked.threshold is not None:
        made.error("--threshold goes with --policy threshold")
    if getattr(asked, "no_draft", False) and (asked.policy or asked.max_draft):
        made.error("--no-draft goes without --policy and --max-draft")


def policy_for(asked: argparse.Namespace, manifest: Manifest) -> Policy:
    """The policy asked for; `PolicyError` where it is out of bounds or the engine lacks a part."""
    from dspark_trt.runtime.budget import NoDraft, PolicyError, Static, Threshold

    threshold = asked.policy == "threshold"
    made: Policy = (
        Threshold(asked.threshold, max_length=asked.max_draft)
        if threshold
        else Static(asked.max_draft)
    )
    drafter: dict[str, Any] | None = manifest.drafter
    if drafter is None and (asked.policy or asked.max_draft):
        raise PolicyError(
            "the engine has no drafter: leave --policy and --max-draft out, or build it again "
            "with --drafter"
        )
    if threshold and drafter is not None and not drafter.get("confidence_head"):
        raise PolicyError(
            "--policy threshold needs a confidence head, the engine's drafter has none: use "
            "--policy static"
        )
    return NoDraft() if drafter is None or getattr(asked, "no_draft", False) else made
