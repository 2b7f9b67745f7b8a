"""A small byte-level BPE tokenizer with special tokens and a chat template, for tiny models.

The vocabulary is exactly as large as asked. From `FULL_BYTES` ids up every byte has a token, so any
text round-trips; below that only the first characters of `ALPHABET` have, and others are dropped.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
ALPHABET = (
    " etaoinshrdlcumwfgypbvkjxqz.\n,TAISHWCBPM0123456789'?!-:;()"
    'DEFGJKLNOQRUVXYZ"*/+=<>[]{}_#%&@$\\^`|~'
)
FULL_BYTES = 300  # vocabulary size from which all 256 bytes are in the alphabet
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SENTENCES = (
    "The river runs past the old mill and under the stone bridge.",
    "She counted seven boats in the harbour before the rain came.",
    "A small model can still learn to repeat what it has seen.",
    "Please write a short answer, then explain how you found it.",
    "What is the price of three apples and two pears? It is five coins.",
    "When the lamp went out, the children told stories until morning.",
    "First sort the numbers; then add them up and print the total.",
    "Der Zug fährt um acht Uhr ab. Le café était fermé à midi. 東京は雨です。 🙂",
)


def special_tokens(vocab: int) -> list[str]:
    """The special tokens that a vocabulary of this size has room for; ids count from 0."""
    if vocab < 8:
        return [EOS]
    return [BOS, EOS] if vocab < 128 else [BOS, EOS, USER, ASSISTANT]


def bos_eos_ids(vocab: int) -> tuple[int, int]:
    """(bos id, eos id); the same token under 8 ids."""
    return (0, 0) if vocab < 8 else (0, 1)


def _alphabet(room: int) -> list[str]:
    """At most `room` symbols of the byte-level alphabet."""
    everything = sorted(pre_tokenizers.ByteLevel.alphabet())
    if room >= FULL_BYTES - 4:
        return everything
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [level.pre_tokenize_str(char)[0][0] for char in ALPHABET[:room]]


def build_tokenizer(vocab: int, *, add_bos: bool = False) -> Tokenizer:
    """Train a tokenizer of exactly `vocab` (>= 3) ids; `add_bos` puts BOS before every text."""
    specials = special_tokens(vocab)
    alphabet = _alphabet(vocab - len(specials))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=specials,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    for i in range(tokenizer.get_vocab_size(), vocab):  # plain text tokens, so that they decode
        tokenizer.add_tokens([AddedToken(f"[{i}]", normalized=False)])
    if add_bos:
        bos = specials[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_eos_ids(vocab)[0])]
        )
    return tokenizer


def save_tokenizer(folder: Path, vocab: int, *, add_bos: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    build_tokenizer(vocab, add_bos=add_bos).save(str(folder / "tokenizer.json"))
    specials = special_tokens(vocab)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0],
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": None,
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
