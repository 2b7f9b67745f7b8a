"""Completions as JSON lines, and the figures of a run in a few lines of text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspark_trt.tools.prompts import Prompt

if TYPE_CHECKING:
    from dspark_trt.runtime.llm import Completion
    from dspark_trt.runtime.metrics import Metrics

SHOWN_LENGTHS = 24


def json_line(prompt: Prompt, completion: Completion) -> str:
    """One line of JSON; `prompt` is the text, or the messages where the file had messages."""
    value: dict[str, Any] = {
        "prompt": prompt.text if prompt.text is not None else list(prompt.messages),
        "sequence_index": completion.sequence_index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "accepted_lengths": completion.accepted_lengths,
    }
    if completion.logprobs is not None:
        value["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [list(t) for t in one.top]}
            for one in completion.logprobs
        ]
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def summary(completions: Sequence[Completion], metrics: Metrics, *, why_one: str | None) -> str:
    """Tokens, speeds and accepted lengths.

    why_one: the reason why each step gives one token, None where drafts were verified.
    """
    tokens = sum(len(c.token_ids) for c in completions)
    reasons = Counter(c.finish_reason for c in completions)
    ends = ", ".join(
        name if len(completions) == 1 else f"{count} {name}" for name, count in reasons.items()
    )
    of = "" if len(completions) == 1 else f" in {len(completions)} answers"
    # The first token of an answer is prefill's; what a step drew past an answer's end is not kept.
    kept = sum(sum(c.accepted_lengths) for c in completions)
    lines = [
        f"{tokens} tokens{of} ({ends})",
        f"prefill {rate(metrics.prefill_tokens, metrics.prefill_seconds)}, "
        f"decode {rate(kept, metrics.decode_seconds)}",
    ]
    if why_one is not None:
        lines.append(f"{why_one}: each step gives one token")
    elif uncut := [length for c in completions for length in c.accepted_lengths_uncut]:
        mean = sum(uncut) / len(uncut)
        lines.append(f"accepted length {mean:.2f} (mean of {len(uncut)}, bonus token counted)")
        if len(completions) == 1 and completions[0].accepted_lengths:
            lines.append(f"accepted lengths {shortened(completions[0].accepted_lengths)}")
    return "\n".join(lines)


def rate(tokens: int, seconds: float) -> str:
    """Tokens a second as text; `-` where there was nothing to time."""
    return f"{tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else "-"


def shortened(lengths: Sequence[int]) -> str:
    """The first lengths, and how many follow."""
    text = " ".join(map(str, lengths[:SHOWN_LENGTHS]))
    more = len(lengths) - SHOWN_LENGTHS
    return f"{text} ... ({more} more)" if more > 0 else text
