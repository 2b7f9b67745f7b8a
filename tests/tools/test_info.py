"""`dspark info`: text for people, JSON for programs, errors for damaged engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dspark_trt.runtime.engine_dir import (
    CheckpointInfo,
    Gpu,
    Limits,
    Manifest,
    read_manifest,
    write_engine_dir,
)
from dspark_trt.tools.cli import main
from dspark_trt.tools.info import measured, size, what_it_allows

LAYER = {"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    with write_engine_dir(tmp_path / "engine") as staged:
        with staged.create("weights.bin") as file:
            file.write(bytes(2_500_000))
        staged.describe(
            Manifest(
                dspark_version="0.1.0",
                versions={"tensorrt": "10.6.0"},
                created="2026-01-02T03:04:05+00:00",
                backend="tensorrt",
                dtype="bfloat16",
                quantize="int4",
                checkpoint=CheckpointInfo("smol", "huggingface", "", "bfloat16"),
                target={
                    "family": "llama",
                    "num_layers": 30,
                    "vocab_size": 49152,
                    "eos_token_ids": [2],
                    "layer": LAYER,
                },
                limits=Limits(8, 100, 200, 64),
                page_size=32,
                drafter_checkpoint=CheckpointInfo("draft", "deepspec", "", "int8"),
                drafter={
                    "num_layers": 5,
                    "vocab_size": 49152,
                    "layer": LAYER,
                    "block_size": 7,
                    "markov_rank": 256,
                    "markov_head_type": "gated",
                    "confidence_head": True,
                },
                tiers=(8, 64),
                gather_context_logits=True,
                gpu=Gpu("H200", "9.0"),
                measured={
                    "perplexity_float32": 12.5,
                    "perplexity_int4": 12.75,
                    "perplexity_tokens": 4000.0,
                    "matrices_in_8_bits": 3.0,
                },
            )
        )
    return tmp_path / "engine"


def test_the_text_says_what_the_engine_is(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(engine)]) == 0
    text = capsys.readouterr().out
    for words in (
        read_manifest(engine).engine_hash,
        "tensorrt, bfloat16, quantize int4",
        "smol (huggingface, bfloat16): llama, 30 layers, hidden 576, heads 9/3 of 64, vocab 49152",
        "block 7, gated head of rank 256, confidence head",
        "8 requests, prompt 100, sequence 200, step 64 tokens",
        "8, 64",
        "pages of 32 tokens, 26.9 kB a token",
        "logits kept",
        "H200 (sm 9.0)",
        "perplexity   12.500 in float32, 12.750 in int4 (+2.0%, on 4000 tokens)",
        "wider        3 matrices in 8 bits, the rest in 4",
        "files (sizes checked)",
        "2.5 MB",
    ):
        assert words in text
    assert "cost_table.json" not in text
    (engine / "cost_table.json").write_text('{"engine_hash": "other"}')
    assert main(["info", str(engine)]) == 0
    assert "of another engine" in capsys.readouterr().out


def test_what_is_not_there_is_not_talked_of(engine: Path) -> None:
    manifest = read_manifest(engine)
    plain = dataclasses.replace(manifest, tiers=(), quantize="none", measured={"x_y": 1.5})
    assert ("tiers", "any (dynamic shapes)") in what_it_allows(plain)
    assert measured(plain) == [("x y", "1.5")]


def test_the_json_holds_the_manifest_and_what_follows(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (engine / "sts.json").write_text(json.dumps({"engine_hash": read_manifest(engine).engine_hash}))
    (engine / "cost_table.json").write_text('{"engine_hash": "other"}')
    assert main(["info", str(engine), "--json", "--verify"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["engine_hash"] == read_manifest(engine).engine_hash
    assert value["total_bytes"] == 2_500_000
    assert value["kv_bytes_per_token"] == 2 * 3 * 64 * 35 * 2
    assert value["made_later"] == {
        "sts.json": "of this engine",
        "cost_table.json": "of another engine",
    }
    (engine / "sts.json").write_text("{")
    main(["info", str(engine), "--json"])
    assert json.loads(capsys.readouterr().out)["made_later"]["sts.json"] == "unreadable"


def test_a_damaged_engine_is_one_line_and_code_2(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray((engine / "weights.bin").read_bytes())
    data[1000] ^= 1
    (engine / "weights.bin").write_bytes(data)
    assert main(["info", str(engine), "--verify"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the file was changed" in captured.err
    assert main(["info", str(engine / "absent")]) == 2


def test_sizes_read_well() -> None:
    assert [size(n) for n in (12, 1200, 98_000_000, 4_131_000_000)] == [
        "12 B",
        "1.2 kB",
        "98.0 MB",
        "4.1 GB",
    ]
