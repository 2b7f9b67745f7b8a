"""The tokenizer of a Hugging Face folder: tokenizer.json, special tokens, chat template.

Also `generation_config.json`, since it says which tokens end a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from dspark_trt.build.json_file import Fields, read_object, read_text
from dspark_trt.build.source import CheckpointError, TokenizerFiles

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
DECODERS = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"})
MAX_TOKENIZER_BYTES = 1 << 28
MAX_TEMPLATE_BYTES = 1 << 20


@contextmanager
def tokenizer_faults(message: str) -> Iterator[None]:
    """Turn whatever the `tokenizers` library raises on bad input into a `CheckpointError`.

    It raises bare Exception, and where its Rust code panics a class below BaseException alone.
    """
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{message}: {error}") from error


def read_tokenizer(folder: Path, eos_token_ids: tuple[int, ...]) -> TokenizerFiles:
    """The tokenizer of a folder; its eos_token is added to the `eos_token_ids` of the model."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(_absent(folder))
    text = read_text(path, max_bytes=MAX_TOKENIZER_BYTES)
    with tokenizer_faults(f"{path} is not a working tokenizer.json"):
        tokenizer = Tokenizer.from_str(text)
        _check_decoder(path, text)
        if tokenizer.truncation or tokenizer.padding:  # left by its last use: no part of the model
            tokenizer.no_truncation()
            tokenizer.no_padding()
            text = tokenizer.to_str()
        prefix = tokenizer.encode("a", add_special_tokens=True).ids[:1]
    config = _optional_object(folder / "tokenizer_config.json")
    legacy = _optional_object(folder / "special_tokens_map.json")
    special = {name: _token(config, name) or _token(legacy, name) for name in SPECIAL}
    for name, token in special.items():
        if token is not None and tokenizer.token_to_id(token) is None:
            if name in ("bos_token", "eos_token"):
                raise CheckpointError(f"{folder}: {name} {token!r} is not in {path.name}")
            special[name] = None
    bos = None if special["bos_token"] is None else tokenizer.token_to_id(special["bos_token"])
    eos = special["eos_token"]
    ends = set(eos_token_ids)
    if eos is not None:
        ends.add(int(tokenizer.token_to_id(eos) or 0))
    return TokenizerFiles(
        text,
        {
            **special,
            "eos_token_ids": sorted(ends),
            # As in Transformers, tokenizer.json decides, whatever add_bos_token says beside it.
            "add_bos": bos is not None and prefix == [bos],
            "chat_template": _chat_template(folder, config),
            "vocab_size": id_bound(tokenizer),
        },
    )


def _check_decoder(path: Path, tokenizer_json: str) -> None:
    """Refuse decoders that the runtime cannot follow token by token."""
    decoder = json.loads(tokenizer_json).get("decoder")
    if decoder is None:
        return
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if unknown := sorted({step["type"] for step in steps} - DECODERS):
        raise CheckpointError(
            f"{path}: decoder {', '.join(unknown)} is not supported; supported are "
            f"{', '.join(sorted(DECODERS))}"
        )


def id_bound(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included; ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1


def _absent(folder: Path) -> str:
    missing = f"{folder} has no tokenizer.json"
    if (folder / "tokenizer.model").is_file() or (folder / "vocab.json").is_file():
        return (
            f"{missing}, only an older tokenizer format: load it once with Transformers' "
            "AutoTokenizer and save_pretrained into this folder"
        )
    return f"{missing}: put the model's tokenizer.json there, or give --tokenizer DIR"


def _optional_object(path: Path) -> Fields:
    return Fields(str(path), read_object(path) if path.is_file() else {})


def _token(config: Fields, name: str) -> str | None:
    """A special token: a string, or an object with its `content`; None where absent."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise config.fail(name, "a string or an object with a string `content`")
    return value


def _chat_template(folder: Path, config: Fields) -> str | None:
    """chat_template.jinja, else tokenizer_config's chat_template (of a list, "default")."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path, max_bytes=MAX_TEMPLATE_BYTES)
    value = config.get("chat_template")
    if isinstance(value, list):
        if not all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in value):
            raise config.fail("chat_template", "a string, or a list of {name, template}")
        value = {item["name"]: item.get("template") for item in value}.get("default")
    if value is not None and not isinstance(value, str):
        raise config.fail("chat_template", "a string, or a list of {name, template}")
    return value


def read_generation_config(folder: Path) -> dict[str, object]:
    """generation_config.json as it is, {} where absent."""
    path = folder / "generation_config.json"
    return read_object(path) if path.is_file() else {}


def eos_ids(generation: Fields, config: Fields, *, vocab_size: int) -> tuple[int, ...]:
    """eos_token_id (one or a list) of the generation config, else of the model's config."""
    fields = generation if generation.has("eos_token_id") else config
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise fields.fail("eos_token_id", f"a token id or a list of them, in [0, {vocab_size})")
    return tuple(sorted(set(ids)))


def check_vocabulary(tokenizer: TokenizerFiles, vocab_size: int, *, where: Path) -> None:
    """Refuse ids beyond the model's vocabulary, which may be padded, and unknown end tokens."""
    known = tokenizer.config["vocab_size"]
    if not isinstance(known, int) or known > vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has ids up to {known} - 1, the model's vocab_size is "
            f"{vocab_size}: this tokenizer belongs to another model"
        )
    ends = tokenizer.config["eos_token_ids"]
    for end in ends if isinstance(ends, list) else []:
        if end >= known:
            raise CheckpointError(
                f"{where}: eos_token_id {end} is not an id of the tokenizer, which ends at {known}"
            )
