"""The tokenizer and chat template of an engine directory.

`DIR/tokenizer/tokenizer.json` is a `tokenizers` file; `DIR/tokenizer/tokenizer_config.json` holds
exactly bos_token, eos_token, pad_token, unk_token, eos_token_ids, add_bos, chat_template and
vocab_size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from dspark_trt.runtime.chat_template import ChatTemplate
from dspark_trt.runtime.pieces import DecoderState, PieceError, decoder_states
from dspark_trt.runtime.sampling_params import RequestError, refuse

MAX_TEXT = 1 << 24  # characters that are encoded at once, far above any context
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(ValueError):
    """The tokenizer's files are missing, broken, or of a kind that is not supported."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """tokenizer_config.json, checked."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    vocab_size: int

    @staticmethod
    def from_json(values: Any, where: Path) -> TokenizerConfig:
        if not isinstance(values, Mapping):
            raise TokenizerError(f"{where}: expected a JSON object: build the engine again")
        names = set(TokenizerConfig.__slots__)
        for problem, fields in (
            ("lacks", names - set(values)),
            ("has unknown", set(values) - names),
        ):
            if fields:
                shown = ", ".join(sorted(fields))
                raise TokenizerError(f"{where}: {problem} {shown}: build the engine again")
        config = TokenizerConfig(**{**values, "eos_token_ids": _id_list(values, where)})
        for name in (*SPECIAL_TOKENS, "chat_template"):
            _check(where, name, getattr(config, name), (str, type(None)))
        _check(where, "add_bos", config.add_bos, (bool,))
        _check(where, "vocab_size", config.vocab_size, (int,))
        for id_ in config.eos_token_ids:
            if not 0 <= id_ < config.vocab_size:
                raise TokenizerError(
                    f"{where}: eos_token_ids must be in [0, {config.vocab_size}), got {id_}: "
                    "build the engine again"
                )
        return config


def _id_list(values: Mapping[str, Any], where: Path) -> tuple[int, ...]:
    ids = values["eos_token_ids"]
    _check(where, "eos_token_ids", ids, (list,))
    for id_ in ids:
        _check(where, "eos_token_ids", id_, (int,))
    return tuple(ids)


def _check(where: Path, name: str, value: object, types: tuple[type, ...]) -> None:
    wrong_bool = isinstance(value, bool) and bool not in types
    if wrong_bool or not isinstance(value, types):
        wanted = " or ".join(t.__name__ for t in types)
        raise TokenizerError(
            f"{where}: {name} must be {wanted}, got {value!r}: build the engine again"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error}): build the engine again") from None


class Tokenizer:
    """Text <-> ids, and messages -> text."""

    def __init__(self, tokenizer_json: str, config: TokenizerConfig, *, where: str) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
            decoder = json.loads(tokenizer_json).get("decoder")
            self._new_state = decoder_states(decoder)
        except PieceError as error:
            raise TokenizerError(f"{where}: {error}") from None
        except Exception as error:  # the library raises Exception itself for a broken file
            raise TokenizerError(f"{where}: not a tokenizers file ({error})") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.config = config
        self._bos_id = None if config.bos_token is None else self.token_id(config.bos_token)
        if config.add_bos and self._bos_id is None:
            raise TokenizerError(f"{where}: add_bos is set, but bos_token is not in the vocabulary")
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self._template: ChatTemplate | None = None

    @staticmethod
    def load(engine_dir: Path | str) -> Tokenizer:
        """Read and check the tokenizer of an engine directory."""
        folder = Path(engine_dir) / "tokenizer"
        path = folder / "tokenizer_config.json"
        try:
            values = json.loads(_read(path))
        except json.JSONDecodeError as error:
            raise TokenizerError(f"{path}: not JSON ({error}): build the engine again") from None
        config = TokenizerConfig.from_json(values, path)
        file = folder / "tokenizer.json"
        return Tokenizer(_read(file), config, where=str(file))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding; the tokenizer may know fewer ids."""
        return self.config.vocab_size

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids, as in Transformers.

        With add_special_tokens a BOS token comes first where the model wants one (never twice).
        """
        if not isinstance(text, str):
            raise refuse("prompt", text, "a string", "give text, or a list of token ids")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt must be valid Unicode, got a lone surrogate at character {error.start}: "
                "decode the bytes as UTF-8 first"
            ) from None
        if len(text) > MAX_TEXT:
            raise RequestError(
                f"prompt must be at most {MAX_TEXT} characters, got {len(text)}: shorten it"
            )
        ids = self._encode(text, add_special_tokens)
        if add_special_tokens and self.config.add_bos and ids[:1] != [self._bos_id]:
            assert self._bos_id is not None
            return [self._bos_id, *ids]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:  # the library's panics are no Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                f"prompt cannot be encoded by the model's tokenizer ({str(error)[:200]}): "
                "shorten it, or leave out what is unusual in it"
            ) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids beyond the tokenizer's vocabulary add nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decoder_state(self) -> DecoderState:
        """A fresh state for decoding one sequence token by token."""
        return self._new_state()

    def piece(self, id_: int, *, skip_special_tokens: bool = True) -> str | None:
        """The token as the vocabulary spells it, None where decoding leaves it out."""
        token = self._tokenizer.id_to_token(id_)
        return None if skip_special_tokens and token in self._special else token

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The conversation as the model was trained to read it.

        Encode the result with `add_special_tokens=False`: special tokens are in it already.
        """
        if self._template is None:
            if self.config.chat_template is None:
                raise RequestError(
                    "messages must be plain text here, since the model has no chat template: "
                    "use generate with a prompt"
                )
            tokens = {name: getattr(self.config, name) for name in SPECIAL_TOKENS}
            present = {name: token for name, token in tokens.items() if token is not None}
            self._template = ChatTemplate(self.config.chat_template, present)
        return self._template.render(messages, add_generation_prompt, variables)
