"""Quantisation that costs too much is widened, matrix by matrix, until it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from factories import load_target, tiny_target
from tiny_engine import tiny_engine
from tokenizers import Tokenizer

from dspark_trt.build import widen
from dspark_trt.build.perplexity import perplexity, text_ids
from dspark_trt.build.quantize import Quantizer
from dspark_trt.build.source import CheckpointError
from dspark_trt.runtime.engine_dir import read_manifest


def fake_measure(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> list[Quantizer]:
    """Perplexity 10 in float32 and `10 * (1 + losses[matrices in 8 bits])` quantised."""
    seen: list[Quantizer] = []

    def measured(folder: Path, quantizer: Quantizer, ids: object, write: object) -> float:
        folder.mkdir(exist_ok=True)
        seen.append(quantizer)
        if not quantizer.bits:
            return 10.0
        quantizer.errors.update({name: i / 10 for i, name in enumerate("abcdefgh")})
        return 10.0 * (1 + losses[len(quantizer.wider)])

    monkeypatch.setattr(widen, "_measured", measured)
    return seen


def quietly(folder: Path, quantize: str = "int4") -> dict[str, float]:
    return widen.write_quantized(folder, quantize, [1, 2], lambda *_: None, lambda line: None)


def test_nothing_is_widened_where_the_loss_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake_measure(monkeypatch, {0: 0.049})
    assert quietly(tmp_path)["matrices_in_8_bits"] == 0
    assert len(seen) == 2  # float32 and int4


def test_the_worst_are_widened_first_in_doubling_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake_measure(monkeypatch, {0: 0.5, 1: 0.3, 2: 0.1, 4: 0.01})
    measured = quietly(tmp_path)
    assert [sorted(q.wider) for q in seen[1:]] == [[], ["h"], ["g", "h"], ["e", "f", "g", "h"]]
    assert measured["matrices_in_8_bits"] == 4
    assert measured["perplexity_int4"] == pytest.approx(10.1)


def test_why_it_tries_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measure(monkeypatch, {0: 0.5, 1: 0.3, 2: 0.01})
    lines: list[str] = []
    widen.write_quantized(tmp_path, "int4", [1, 2], lambda *_: None, lines.append)
    assert [line for line in lines if "widening" in line] == [
        "more than 5%: widening the worst 1 to 8 bits",
        "more than 5%: widening the worst 2 to 8 bits",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def measured(folder: Path, *_: object) -> float:
        folder.mkdir(exist_ok=True)
        return value

    monkeypatch.setattr(widen, "_measured", measured)
    with pytest.raises(CheckpointError, match=f"non-finite logits: its perplexity .* is {value}"):
        quietly(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_quantised_logits_that_are_not_finite_are_widened_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    fake_measure(monkeypatch, {0: value, 1: value, 2: 0.0})
    assert quietly(tmp_path)["matrices_in_8_bits"] == 2
    fake_measure(monkeypatch, dict.fromkeys(range(9), value))
    with pytest.raises(CheckpointError, match="non-finite logits in int4.*without --quantize"):
        quietly(tmp_path)


def test_a_loss_that_stays_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_measure(monkeypatch, dict.fromkeys(range(9), 0.2))
    assert quietly(tmp_path)["matrices_in_8_bits"] == 8
    assert "costs 20.0 % of perplexity" in caplog.text


def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    import torch

    target = tiny_target(tmp_path, "qwen3")
    engine = tiny_engine(tmp_path / "engine", target)
    ids = np.random.default_rng(0).integers(3, 256, 70).tolist()
    with torch.no_grad():
        tokens = torch.tensor([ids])
        loss = float(load_target(target)(tokens, labels=tokens).loss)
    assert perplexity(engine / "target.onnx", ids) == pytest.approx(np.exp(loss), rel=1e-4)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_quantised_engine_says_what_it_cost(tmp_path: Path, quantize: str) -> None:
    engine = tiny_engine(
        tmp_path / "engine", tiny_target(tmp_path, "llama", hidden=64), quantize=quantize
    )
    measured = read_manifest(engine).measured
    assert measured["perplexity_tokens"] > 100
    assert measured[f"perplexity_{quantize}"] <= 1.05 * measured["perplexity_float32"]
    names = {p.name for p in engine.iterdir()}
    assert names == {"manifest.json", "target.onnx", "weights.bin", "tokenizer"}


def test_text_ids_have_no_special_tokens(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "llama", add_bos=True)
    text = (target / "tokenizer.json").read_text()
    assert 0 not in text_ids(text, "plain words")


def test_text_ids_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_target(tmp_path, "llama") / "tokenizer.json"))
    whole = text_ids(tokenizer.to_str(), "plain words")
    assert len(whole) > 4
    tokenizer.enable_truncation(4)
    assert text_ids(tokenizer.to_str(), "plain words") == whole
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=64)
    assert text_ids(tokenizer.to_str(), "plain words") == whole
