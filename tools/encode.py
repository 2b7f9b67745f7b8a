"""Prompts to token ids, each checked against the engine before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.runtime.sampling_params import RequestError, refuse
from dspark_trt.tools.prompts import Prompt, PromptsError

if TYPE_CHECKING:
    from dspark_trt.runtime.llm import LLM


def single_prompt(text: str) -> Prompt:
    """The prompt of a command line; `RequestError` where it is empty or no Unicode text."""
    if not text:
        raise refuse("--prompt", text, "text of at least one token", "give some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"--prompt must be UTF-8 text, got another byte at character {error.start + 1}: "
            "check the terminal's encoding"
        ) from None
    return Prompt(0, text=text)


def encode_prompts(
    llm: LLM, prompts: Sequence[Prompt], *, chat: bool, file: Path | None = None
) -> list[list[int]]:
    """Token ids of each prompt.

    Raises `RequestError` at a prompt that the engine cannot serve; where the prompts come from
    `file` it is a `PromptsError` that names the line.
    """
    if chat and llm.tokenizer.config.chat_template is None:
        raise RequestError("--chat needs a chat template, the model has none: leave --chat out")
    encoded = []
    for prompt in prompts:
        try:
            encoded.append(_encode(llm, prompt, chat=chat))
        except RequestError as error:
            if file is None:
                raise
            raise PromptsError(f"{file}:{prompt.line}: {error}") from None
    return encoded


def _encode(llm: LLM, prompt: Prompt, *, chat: bool) -> list[int]:
    from dspark_trt.runtime.request import check_prompt

    if chat:
        ids = llm.chat_prompt(prompt.as_messages())
    elif prompt.text is None:
        raise RequestError("messages need the chat template: give --chat")
    else:
        ids = llm.tokenizer.encode(prompt.text)
    limits = llm.manifest.limits
    longest = min(limits.max_input_len, limits.max_seq_len - 1)
    check_prompt(ids, vocab_size=llm.vocab_size, max_prompt_len=longest)
    return ids
