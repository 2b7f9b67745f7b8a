"""Tokenizers of Hugging Face folders: special tokens, BOS, chat templates, bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import edit_json
from tiny_tokenizer import CHAT_TEMPLATE, save_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dspark_trt.build.config import ConfigError
from dspark_trt.build.source import CheckpointError
from dspark_trt.build.tokenizer_files import check_vocabulary, read_tokenizer, tokenizer_faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path, 300)
    return tmp_path


def test_config_has_exactly_the_agreed_keys(folder: Path) -> None:
    files = read_tokenizer(folder, (7, 1))
    assert files.config == {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|eos|>",
        "unk_token": None,
        "eos_token_ids": [1, 7],
        "add_bos": False,
        "chat_template": CHAT_TEMPLATE,
        "vocab_size": 300,
    }
    assert files.tokenizer_json == (folder / "tokenizer.json").read_text()


def test_special_tokens_may_be_objects_or_stand_in_the_old_map(folder: Path) -> None:
    edit_json(
        folder / "tokenizer_config.json",
        bos_token={"content": "<|user|>", "special": True, "__type": "AddedToken"},
        eos_token=...,
        pad_token="<absent>",
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|assistant|>"}))
    config = read_tokenizer(folder, ()).config
    assert (config["bos_token"], config["eos_token"]) == ("<|user|>", "<|assistant|>")
    assert (config["pad_token"], config["eos_token_ids"]) == (None, [3])


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("flag", [True, False, ...])
def test_bos_is_added_where_transformers_adds_it(
    tmp_path: Path, flag: bool | Any, template: bool
) -> None:
    save_tokenizer(tmp_path, 300, add_bos=template)
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token=flag)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("the river").input_ids
    config = read_tokenizer(tmp_path, ()).config
    assert config["add_bos"] is (ids[0] == theirs.bos_token_id) is template
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bos = [ours.token_to_id(config["bos_token"])] if config["add_bos"] else []
    assert bos + ours.encode("the river", add_special_tokens=False).ids == ids


def test_chat_template_of_a_file_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert read_tokenizer(folder, ()).config["chat_template"] == "{{ 1 }}"


def test_chat_template_of_a_list_is_the_default_one(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert read_tokenizer(folder, ()).config["chat_template"] == "D"
    edit_json(folder / "tokenizer_config.json", chat_template=named[:1])
    assert read_tokenizer(folder, ()).config["chat_template"] is None
    edit_json(folder / "tokenizer_config.json", chat_template=3)
    with pytest.raises(ConfigError, match="chat_template must be a string"):
        read_tokenizer(folder, ())


def test_absent_tokenizer_says_what_to_do(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json: put .*--tokenizer DIR"):
        read_tokenizer(folder, ())
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match="older tokenizer format"):
        read_tokenizer(folder, ())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": {"type": "BPE"}}', "\x00"])
def test_broken_tokenizer_files_are_named(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_tokenizer(folder, ())


def test_a_panic_of_the_library_is_a_clear_error(folder: Path) -> None:
    """A prefix longer than the tokens makes the library's Rust code panic."""
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["continuing_subword_prefix"] = "<|im_a_long_prefix|>"
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"not a working tokenizer\.json"):
        read_tokenizer(folder, ())


def test_an_interrupt_is_no_fault_of_the_file() -> None:
    with pytest.raises(KeyboardInterrupt), tokenizer_faults("x"):
        raise KeyboardInterrupt


def test_end_token_must_be_in_the_vocabulary(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token="<nowhere>")
    with pytest.raises(CheckpointError, match=r"eos_token '<nowhere>' is not in tokenizer\.json"):
        read_tokenizer(folder, ())


def test_vocabulary_may_be_padded_but_not_cut(folder: Path) -> None:
    files = read_tokenizer(folder, ())
    check_vocabulary(files, 300, where=folder)
    check_vocabulary(files, 512, where=folder)
    with pytest.raises(CheckpointError, match="vocab_size is 299: this tokenizer belongs to"):
        check_vocabulary(files, 299, where=folder)
    with pytest.raises(CheckpointError, match="eos_token_id 400 is not an id of the tokenizer"):
        check_vocabulary(read_tokenizer(folder, (400,)), 512, where=folder)


def test_ids_with_gaps_count_up_to_the_largest(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    tokens = values["model"]["vocab"]
    last = max(tokens, key=lambda t: tokens[t])
    tokens[last] = 350
    values["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert read_tokenizer(folder, ()).config["vocab_size"] == 351


def test_truncation_and_padding_are_not_carried_along(folder: Path) -> None:
    plain = read_tokenizer(folder, ())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    # On the left, and by BOS: what a padded "a" starts with is no sign that the model wants one.
    tokenizer.enable_padding(direction="left", pad_id=0, pad_token="<|bos|>", length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = read_tokenizer(folder, ())
    assert files.config == plain.config
    values = json.loads(files.tokenizer_json)
    assert values["truncation"] is values["padding"] is None
    text = "many words, more than four tokens"
    ids = Tokenizer.from_str(files.tokenizer_json).encode(text).ids
    assert ids == Tokenizer.from_str(plain.tokenizer_json).encode(text).ids


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Sequence", "decoders": [
            {"type": "Fuse"}, {"type": "BPEDecoder", "suffix": "</w>"}]}, "BPEDecoder"),
    ],
)  # fmt: skip
def test_decoders_that_the_runtime_lacks_are_refused(
    folder: Path, decoder: dict[str, Any], named: str
) -> None:
    edit_json(folder / "tokenizer.json", decoder=decoder)
    with pytest.raises(CheckpointError, match=f"decoder {named} is not supported; supported are"):
        read_tokenizer(folder, ())


@pytest.mark.parametrize(
    "value", [[{"name": ["default"], "template": "x"}], [{"template": "x"}], ["default"]]
)
def test_chat_templates_without_a_name_are_refused(folder: Path, value: object) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=value)
    with pytest.raises(ConfigError, match="tokenizer_config.json: chat_template must be a string"):
        read_tokenizer(folder, ())
