"""A tokenizer.json from the `tokenizer.ggml.*` metadata of a GGUF file.

Two kinds of vocabulary: `gpt2` (byte-level BPE with merges; `tokenizer.ggml.pre` names how text is
split before) and `llama` (SentencePiece BPE with scores and byte fallback; merges follow from the
scores). Ids are those that Transformers gives for the same file.
"""

from __future__ import annotations

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dspark_trt.build.gguf_file import GgufFile
from dspark_trt.build.source import CheckpointError, TokenizerFiles
from dspark_trt.build.tokenizer_files import id_bound, tokenizer_faults

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
MAX_TOKEN = 1 << 12  # characters
SPACE = "\u2581"  # how SentencePiece writes a space
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{SYMBOLS}|{SPACES}"
# tokenizer.ggml.pre -> the split pattern; None is GPT-2's, built into the byte-level pre-tokenizer.
# smollm's own tokenizer splits digits first; its merges hold no digit, and Transformers reads the
# file with GPT-2's pattern, which we follow.
SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


def tokenizer_from_metadata(file: GgufFile) -> TokenizerFiles:
    """The tokenizer, special tokens and chat template of a GGUF file."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise CheckpointError(
            f"{file.path} has no tokenizer (tokenizer.ggml.model is missing): give --tokenizer DIR"
        )
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; supported are gpt2 and "
            "llama: give --tokenizer DIR"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    with tokenizer_faults(f"{file.path}: the tokenizer is inconsistent"):
        tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
        _add_special(file, tokenizer, tokens)
        text = tokenizer.to_str()
    special: dict[str, object] = {
        name: None if (i := _id(file, key)) is None else tokens[i]
        for name, key in SPECIAL_KEYS.items()
    }
    template = file.metadata.get("tokenizer.chat_template")
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    config = special | {
        "eos_token_ids": list(eos_token_ids(file)),
        "add_bos": bool(add_bos) and special["bos_token"] is not None,
        "chat_template": template if isinstance(template, str) else None,
        "vocab_size": id_bound(tokenizer),
    }
    return TokenizerFiles(text, config)


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end a text: end of sequence, of turn, of message."""
    found = {_id(file, key) for key in END_KEYS} - {None}
    return tuple(sorted(i for i in found if i is not None))


def _id(file: GgufFile, key: str) -> int | None:
    """A token id of the metadata, checked against the vocabulary; None where absent."""
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    most = len(tokens) if isinstance(tokens, list) else 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{key} must be an id in [0, {most}), got {value!r}"
        )
    return value


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{file.path}: metadata {key} must be a list of strings, not empty")
    for index, item in enumerate(value):
        if len(item) > MAX_TOKEN:
            raise CheckpointError(
                f"{file.path}: item {index} of {key} has {len(item)} characters, at most "
                f"{MAX_TOKEN} are read"
            )
    return value


def _numbers(file: GgufFile, key: str, count: int) -> np.ndarray:
    """An array of `count` finite numbers, one per token."""
    value = file.metadata.get(key)
    if not isinstance(value, np.ndarray) or len(value) != count or not np.all(np.isfinite(value)):
        got = f"{len(value)} values" if isinstance(value, np.ndarray) else repr(value)
        raise CheckpointError(
            f"{file.path}: metadata {key} must hold {count} finite numbers, one per token, "
            f"got {got}"
        )
    return value


def _vocabulary(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    """Token -> id; a token that is there twice would leave an id without a text."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise CheckpointError(f"{file.path}: token {twice!r} is in tokenizer.ggml.tokens twice")
    return vocabulary


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE; tokens that are not written in the byte alphabet are respelled in it."""
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; supported are "
            f"{', '.join(SPLITS)}: give --tokenizer DIR with the model's own tokenizer.json"
        )
    spelling = byte_alphabet()
    letters = set(spelling)
    spelled = [
        t if letters.issuperset(t) else "".join(spelling[b] for b in t.encode()) for t in tokens
    ]
    merges = _strings(file, "tokenizer.ggml.merges")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(file, spelled),
            merges=[_pair(file, merge) for merge in merges],
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    split = SPLITS[pre]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.merges holds {merge!r}, expected two tokens and a space"
        )
    return left, right


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE with byte fallback; a text starts with a space that decoding drops."""
    vocabulary = _vocabulary(file, tokens)
    if "tokenizer.ggml.merges" in file.metadata:
        merges = [_pair(file, merge) for merge in _strings(file, "tokenizer.ggml.merges")]
    else:
        scores = _numbers(file, "tokenizer.ggml.scores", len(tokens))
        merges = merges_from_scores(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="first", split=False
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def merges_from_scores(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score of the whole first.

    Ties: the longer left part, then the longer right part, then the order of ids (whole, left,
    right).
    """
    found: list[tuple[float, int, int, tuple[int, int, int], tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            i, j = vocabulary.get(left), vocabulary.get(right)
            if i is not None and j is not None:
                ids = (index, i, j)
                found.append((-float(scores[index]), -len(left), -len(right), ids, (left, right)))
    return [pair for *_, pair in sorted(found)]


def _add_special(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Control tokens and the named ones become special, user-defined ones stay whole in a text.

    In a byte-level vocabulary a control token with other characters than the byte alphabet's is a
    converter's mistake: it was respelled above and is no text of its own.
    """
    kinds: list[int] = [0] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        kinds = _numbers(file, "tokenizer.ggml.token_type", len(tokens)).tolist()
    known = tokenizer.get_vocab(with_added_tokens=False)
    control = [t for t, kind in zip(tokens, kinds) if kind == CONTROL and t in known]
    user = [t for t, kind in zip(tokens, kinds) if kind == USER_DEFINED and t in known]
    named = [tokens[i] for key in SPECIAL_KEYS.values() if (i := _id(file, key)) is not None]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user])
    added = set(control) | set(user)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token in dict.fromkeys(named)
            if token in known and token not in added
        ]
    )
