"""What a user may ask of the sampling of one request, checked once, at birth.

Every refusal is a `RequestError` that names the field, the value, the bound and what to do. Numbers
are finite and bounded so that no law computed from them in float32 can hold a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

MAX_LOGPROBS = 20
MAX_SEQUENCES = 256
TEMPERATURE_RANGE = (1e-9, 1e9)  # of a temperature that is not 0
REPETITION_RANGE = (1e-6, 1e6)
LOGIT_BOUND = 1e9  # largest |value| of a bias or an additive penalty


class RequestError(ValueError):
    """A request that cannot be served as asked; the message says which field, and what to do."""


def refuse(field: str, value: object, bound: str, advice: str) -> RequestError:
    """The one shape of a refusal: field, bound, value, what to do."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RequestError(f"{field} must be {bound}, got {shown}: {advice}")


def checked_int(
    field: str, value: object, *, low: int, high: int | None = None, advice: str
) -> int:
    """`value` as int in `[low, high]`; bools and floats are refused."""
    bound = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refuse(field, value, bound, advice)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise refuse(field, value, bound, advice)
    return number


def checked_float(
    field: str, value: object, *, low: float, high: float, advice: str, bound: str | None = None
) -> float:
    """`value` as a finite float in `[low, high]`; bools are refused. bound: as the error has it."""
    bound = bound or f"a number in [{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refuse(field, value, bound, advice)
    number = float(value)
    if not (math.isfinite(number) and low <= number <= high):
        raise refuse(field, value, bound, advice)
    return number


def checked_bool(field: str, value: object) -> bool:
    """`value`, where it is a bool."""
    if not isinstance(value, bool):
        raise refuse(field, value, "True or False", "give a bool")
    return value


def checked_ids(field: str, value: object) -> tuple[int, ...]:
    """Token ids as a tuple of non-negative ints; the vocabulary's bound is checked later."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise refuse(field, value, "a list of token ids", "give ids such as [2, 17]")
    return tuple(
        checked_int(f"{field}[{i}]", id_, low=0, advice="token ids start at 0")
        for i, id_ in enumerate(value)
    )


def checked_strings(field: str, value: object) -> tuple[str, ...]:
    """One non-empty string or a sequence of them, as a tuple."""
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) and s for s in items):
        raise refuse(
            field,
            value,
            "a non-empty string or a list of them",
            "leave empty strings out; token ids go into stop_token_ids",
        )
    return tuple(items)


def checked_temperature(field: str, value: object) -> float:
    """0 (argmax) or a number in `TEMPERATURE_RANGE`."""
    low, high = TEMPERATURE_RANGE
    bound, advice = f"0 or a number in [{low:g}, {high:g}]", "give 0 for the likeliest token"
    number = checked_float(field, value, low=0.0, high=high, advice=advice, bound=bound)
    if 0.0 < number < low:
        raise refuse(field, value, bound, advice)
    return number


def checked_words(field: str, value: object) -> tuple[str | tuple[int, ...], ...]:
    """Words as strings or token-id lists, none empty."""
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, Sequence):
        raise refuse(field, value, "a list of words", "give strings or token-id lists")
    checked: list[str | tuple[int, ...]] = []
    for i, word in enumerate(words):
        ids = word if isinstance(word, str) else checked_ids(f"{field}[{i}]", word)
        if len(ids) == 0:
            raise refuse(f"{field}[{i}]", word, "a non-empty word", "leave empty words out")
        checked.append(ids)
    return tuple(checked)


def checked_bias(field: str, value: object) -> dict[int, float]:
    """Token id -> finite bias; to ban a token use `bad_words` or a bias of -1e9."""
    if not isinstance(value, Mapping):
        raise refuse(field, value, "a mapping of token id to bias", "give for example {42: -5.0}")
    advice = "to ban a token use bad_words"
    return {
        checked_int(f"{field} key", id_, low=0, advice="token ids start at 0"): checked_float(
            f"{field}[{id_!r}]", bias, low=-LOGIT_BOUND, high=LOGIT_BOUND, advice=advice
        )
        for id_, bias in value.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling of one request. A row's logits pass, in this order: bias, repetition penalty,
    presence and frequency penalties, bans, temperature, top-k, top-p, min-p."""

    max_tokens: int = 128  # new tokens at most; 0 = none, without model work
    min_tokens: int = 0  # no end id, stop id or stop string before so many tokens
    temperature: float = 0.0  # 0 = argmax, ties to the lowest id
    # The law of the drafts: None = temperature, 0 = argmax drafts. Changes speed, never the
    # output's law. At temperature 0 drafts are argmax, and a value above 0 is refused.
    draft_temperature: float | None = None
    top_k: int = 0  # 0 = off; above the vocabulary means all of it
    top_p: float = 1.0  # in (0, 1]; 1 = off
    min_p: float = 0.0  # in [0, 1]; 0 = off
    repetition_penalty: float = 1.0  # > 0; tokens of prompt and output
    presence_penalty: float = 0.0  # tokens of the output, of the prompt too if penalty_prompt
    frequency_penalty: float = 0.0
    penalty_prompt: bool = False
    logit_bias: Mapping[int, float] | None = None  # token id -> finite bias
    # Words that must not appear: strings (taken with and without one leading space) or id lists.
    bad_words: Sequence[str | Sequence[int]] = ()
    stop: str | Sequence[str] = ()  # matched on the text, across token borders
    include_stop: bool = False  # keep a matched stop string or stop id in the output
    stop_token_ids: Sequence[int] = ()
    seed: int = 0  # in [0, 2^64)
    logprobs: int | None = None  # None = off; n = the token's own and the n likeliest
    ignore_eos: bool = False  # end ids are ordinary tokens
    n: int = 1  # independent sequences per prompt

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_laws()
        self._check_penalties()
        for field in ("penalty_prompt", "include_stop", "ignore_eos"):
            checked_bool(field, getattr(self, field))
        self._set("stop", checked_strings("stop", self.stop))
        self._set("stop_token_ids", checked_ids("stop_token_ids", self.stop_token_ids))
        self._set("bad_words", checked_words("bad_words", self.bad_words))
        if self.logit_bias is not None:
            self._set("logit_bias", checked_bias("logit_bias", self.logit_bias))

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _check_counts(self) -> None:
        ranges: dict[str, tuple[int, int | None, str]] = {
            "max_tokens": (0, None, "give the number of new tokens wanted"),
            "min_tokens": (0, None, "give 0 for no minimum"),
            "top_k": (0, None, "give 0 to turn top_k off"),
            "seed": (0, 2**64 - 1, "take the seed modulo 2^64"),
            "n": (
                1,
                MAX_SEQUENCES,
                "give 1 for one answer; for more than the bound send more requests",
            ),
        }
        for field, (low, high, advice) in ranges.items():
            value = checked_int(field, getattr(self, field), low=low, high=high, advice=advice)
            self._set(field, value)
        if self.logprobs is not None:
            advice = "give None to turn logprobs off"
            checked = checked_int(
                "logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, advice=advice
            )
            self._set("logprobs", checked)
        if self.min_tokens > self.max_tokens:
            raise refuse(
                "min_tokens",
                self.min_tokens,
                f"<= max_tokens ({self.max_tokens})",
                "lower min_tokens or raise max_tokens",
            )

    def _check_laws(self) -> None:
        self._set("temperature", checked_temperature("temperature", self.temperature))
        if self.draft_temperature is not None:
            draft = checked_temperature("draft_temperature", self.draft_temperature)
            if self.temperature == 0.0 and draft != 0.0:
                raise refuse(
                    "draft_temperature",
                    draft,
                    "0 or None at temperature 0",
                    "drafts are argmax there; leave draft_temperature out",
                )
            self._set("draft_temperature", draft)
        bound, advice = "a number in (0, 1]", "give 1 to turn it off"
        top_p = checked_float("top_p", self.top_p, low=0.0, high=1.0, advice=advice, bound=bound)
        if top_p == 0.0:
            raise refuse("top_p", self.top_p, bound, advice)
        # Below 1e-9 the nucleus is the likeliest token alone; float32 must not round it to 0.
        self._set("top_p", max(top_p, 1e-9))
        advice = "give 0 to turn it off"
        self._set("min_p", checked_float("min_p", self.min_p, low=0.0, high=1.0, advice=advice))

    def _check_penalties(self) -> None:
        low, high = REPETITION_RANGE
        value = checked_float(
            "repetition_penalty",
            self.repetition_penalty,
            low=low,
            high=high,
            advice="give 1 to turn it off",
        )
        self._set("repetition_penalty", value)
        for field in ("presence_penalty", "frequency_penalty"):
            value = checked_float(
                field,
                getattr(self, field),
                low=-LOGIT_BOUND,
                high=LOGIT_BOUND,
                advice="give 0 to turn it off",
            )
            self._set(field, value)

    @property
    def law_of_drafts(self) -> float:
        """The temperature drafts are drawn at: `draft_temperature`, or `temperature` if None."""
        return self.temperature if self.draft_temperature is None else self.draft_temperature

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids outside `[0, vocab_size)` in `logit_bias`, `stop_token_ids`, `bad_words`."""
        words = [word for word in self.bad_words if not isinstance(word, str)]
        for field, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", [id_ for word in words for id_ in word]),
        ):
            for id_ in ids:
                if id_ >= vocab_size:
                    raise refuse(
                        field, id_, f"ids below {vocab_size}", "the model has no such token"
                    )
