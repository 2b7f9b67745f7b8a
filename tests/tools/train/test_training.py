"""Training runs of seconds: what is learned, what moves, how a run ends and goes on."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import load_target, save_target, tiny_target
from markov_pair import markov_pair
from train_case import CPU, Case, make_case, random_corpus

from dspark_trt.build.checkpoint import open_target
from dspark_trt.tools.train.batches import RowPlan, choose_anchors, make_batch, step_data
from dspark_trt.tools.train.checkpoint import FOLDER, Progress, load_checkpoint
from dspark_trt.tools.train.config import TrainError
from dspark_trt.tools.train.corpus import Corpus, read_corpus
from dspark_trt.tools.train.data import DataOptions, write_data
from dspark_trt.tools.train.evaluate import evaluate
from dspark_trt.tools.train.loop import Trainer
from dspark_trt.tools.train.target import TorchTarget
from dspark_trt.tools.train.team import Team

ALONE = Team(0, 1, CPU)


def trainer(case: Case, corpus: Corpus, output: Path, **options: Any) -> Trainer:
    output.mkdir(exist_ok=True)
    settings = {"progress": Progress()} | options
    return Trainer(case.step, corpus, corpus, case.config, output=output, team=ALONE, **settings)


def copying_target(folder: Path) -> Path:
    """A target whose next token is its last one, with near certainty."""
    path = tiny_target(folder, "llama", vocab=32, hidden=64, tie=True, add_bos=False)
    model = load_target(path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        basis = torch.linalg.qr(torch.randn(64, 64))[0][:32]
        model.model.embed_tokens.weight.copy_(basis)
        model.model.norm.weight.fill_(1.5)
    save_target(model, path)
    return path


def test_a_target_that_copies_its_input_is_accepted_always(tmp_path: Path) -> None:
    case = make_case(copying_target(tmp_path), learning_rate=0.01, steps=60, epochs=100.0, rank=16)
    corpus = random_corpus(tmp_path / "data", 32, [24] * 40)
    corpus.tokens[:] = corpus.tokens[::24].repeat(24)  # every document one token, again and again
    run = trainer(case, corpus, tmp_path / "run")
    assert run.run()
    found = run.evaluate()
    assert found["argmax_rates"] == [1.0] * 4
    assert found["served_length"] > 4.5  # 5 but at the end of a document
    corpus.records["temperature"] = 1.0
    assert min(evaluate(case.step, corpus, case.config)["sampled_rates"]) > 0.9


def test_gradients_reach_the_drafter_and_nothing_else(tmp_path: Path) -> None:
    case = make_case(tiny_target(tmp_path, "qwen3"), noise=0.02)
    corpus = random_corpus(tmp_path / "data", 256, [30] * 4)
    before = [case.target.embed.clone(), case.target.lm_head.clone()]
    before += [layer.down.clone() for layer in case.target.layers]
    run = trainer(case, corpus, tmp_path / "run")
    data = step_data(corpus, RowPlan(corpus, case.config), case.config, at=(0, 0), part=(0, 1))
    case.step(data.batches[0]).total.backward()
    for name, parameter in case.drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert not case.target.embed.requires_grad and case.target.embed.grad is None
    run._update()
    after = [case.target.embed, case.target.lm_head, *(x.down for x in case.target.layers)]
    assert all(torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.parametrize("detach", [False, True])
def test_detached_confidence_leaves_the_backbone_alone(tmp_path: Path, detach: bool) -> None:
    case = make_case(
        tiny_target(tmp_path, "llama"),
        noise=0.02,
        detach_confidence=detach,
        ce_weight=0.0,
        tv_weight=0.0,
    )
    corpus = random_corpus(tmp_path / "data", 256, [30] * 4)
    data = step_data(corpus, RowPlan(corpus, case.config), case.config, at=(0, 0), part=(0, 1))
    case.step(data.batches[0]).total.backward()
    assert case.drafter.confidence_head is not None
    assert case.drafter.confidence_head.proj.weight.grad.abs().max() > 0
    reached = case.drafter.fc.weight.grad.abs().max() > 0
    assert bool(reached) is not detach


def test_the_loss_of_a_document_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    case = make_case(tiny_target(tmp_path, "llama"), noise=0.02)
    first = random_corpus(tmp_path / "first", 256, [12], seed=9)
    terms = []
    for seed in (1, 2):
        corpus = random_corpus(tmp_path / str(seed), 256, [30, 12, 40, 20], seed=seed)
        corpus.tokens[corpus.starts[1] :][:12] = first.document(0)
        rows = [[0, 1], [2], [3], []]
        anchors = [choose_anchors(corpus, row, 0, case.config) for row in rows]
        batch = make_batch(corpus, rows, anchors, case.config)
        mine = (batch.source >= 30) & (batch.source < 42) & (batch.weight > 0)
        assert mine.sum() > 20  # all anchors of the short document
        terms.append(case.step(batch).slots.l1[mine])
    torch.testing.assert_close(*terms, atol=1e-5, rtol=1e-5)


def test_a_minute_of_training_beats_chance_by_far(tmp_path: Path) -> None:
    """An untrained drafter commits 1.4 (argmax) and 1.7 (sampled) tokens a step.

    Asked for: 2.5 of both (about 3.6 are reached).
    """
    folder, _ = markov_pair(tmp_path, vocab=64)
    checkpoint = open_target(folder)
    target = TorchTarget(checkpoint, CPU, max_tokens=65)
    options = DataOptions(
        prompts=_prompts(tmp_path),
        document_tokens=64,
        answer_tokens=40,
        temperatures=(0.0, 1.0),
        slots=64,
    )
    write_data(checkpoint, target, options, tmp_path / "data")
    corpus = read_corpus(tmp_path / "data", vocab_size=64)
    training, held_out = corpus.split(0.15)
    case = make_case(
        folder, row_tokens=64, anchors=32, rows=8, rank=32, steps=250, epochs=1e3,
        learning_rate=3e-3, vocabulary_chunk=512, max_seconds=45.0, log_every=50,
    )  # fmt: skip
    run = trainer(case, training, tmp_path / "run")
    before = evaluate(case.step, held_out, case.config)
    run.run()
    after = evaluate(case.step, held_out, case.config)
    assert before["argmax_length"] < 1.6
    assert before["sampled_length"] < 1.8
    assert after["argmax_length"] > 2.5
    assert after["sampled_length"] > 2.5
    assert after["confidence_auc"] > 0.6


def _prompts(folder: Path) -> Path:
    words = [
        "river",
        "mill",
        "bridge",
        "boats",
        "harbour",
        "rain",
        "model",
        "answer",
        "apples",
        "pears",
        "numbers",
        "lamp",
    ]
    lines = [f'{{"prompt": "{a} {b} {c}"}}' for a in words for b in words[:6] for c in words[:3]]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def weights(case: Case) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in case.drafter.parameters()])


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama")
    corpus = random_corpus(tmp_path / "data", 256, [30] * 11)
    settings = {"steps": 8, "epochs": 100.0}
    whole = make_case(folder, **settings)
    trainer(whole, corpus, tmp_path / "whole").run()

    first = make_case(folder, **settings)
    run = trainer(first, corpus, tmp_path / "broken")
    run.last_step = 3  # as a kill after a checkpoint at step 3 leaves it
    share = run._share
    run._share = lambda: share() if run.progress.step < 3 else 1.0  # type: ignore[method-assign]
    run.last_step = 8
    run.run()
    state = load_checkpoint(tmp_path / "broken", CPU)
    assert state["progress"]["step"] == 3
    second = make_case(folder, noise=1.0, **settings)
    second.drafter.load_state_dict(state["drafter"])
    trainer(
        second,
        corpus,
        tmp_path / "broken",
        progress=Progress(**state["progress"]),
        optimizer_state=state["optimizer"],
    ).run()
    torch.testing.assert_close(weights(second), weights(whole), atol=1e-7, rtol=1e-6)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_tensor(tmp_path: Path) -> None:
    case = make_case(tiny_target(tmp_path, "llama"), steps=20, epochs=100.0)
    corpus = random_corpus(tmp_path / "data", 256, [30] * 11)
    run = trainer(case, corpus, tmp_path / "run")
    run.last_step, good = 2, case.config
    run.run()
    saved = load_checkpoint(tmp_path / "run", CPU)["drafter"]
    with torch.no_grad():
        case.drafter.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    run.last_step = 20
    with pytest.raises(TrainError) as caught:
        run.run()
    text = str(caught.value)
    assert "the loss of step 3 is nan" in text
    assert "the first gradient that is no number is that of" in text
    assert str(tmp_path / "run" / FOLDER) in text and "--learning-rate" in text
    kept = load_checkpoint(tmp_path / "run", CPU)
    assert kept["progress"]["step"] == 2 and good is case.config
    assert all(torch.equal(kept["drafter"][name], value) for name, value in saved.items())


def test_an_exploding_loss_stops_the_run(tmp_path: Path) -> None:
    case = make_case(tiny_target(tmp_path, "llama"), steps=20, epochs=100.0, max_loss=0.5)
    corpus = random_corpus(tmp_path / "data", 256, [30] * 8)
    with pytest.raises(TrainError, match=r"loss of step 1 is .*max_loss 0.5.*no checkpoint yet"):
        trainer(case, corpus, tmp_path / "run").run()


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_every_depth_trains_twenty_steps_without_a_nan(tmp_path: Path, layers: int) -> None:
    case = make_case(tiny_target(tmp_path, "llama"), layers=layers, steps=20, epochs=100.0)
    corpus = random_corpus(tmp_path / "data", 256, [30] * 8)
    trainer(case, corpus, tmp_path / "run").run()
    with (tmp_path / "run" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 20]
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    assert float(rows[-1]["learning_rate"]) < 1e-5


def test_pieces_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "llama")
    corpus = random_corpus(tmp_path / "data", 256, [30] * 8)
    ends = []
    for micro in (0, 1):
        case = make_case(folder, steps=2, epochs=100.0, micro_rows=micro, learning_rate=1e-3)
        trainer(case, corpus, tmp_path / f"run{micro}").run()
        ends.append(weights(case))
    torch.testing.assert_close(*ends, atol=1e-5, rtol=1e-4)
