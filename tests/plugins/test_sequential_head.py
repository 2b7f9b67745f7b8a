"""SequentialHead: logits and confidences against plain numpy, tokens against the law they claim."""

from __future__ import annotations

import numpy as np
import pytest
from op_harness import run_op
from reference.law import draft_law, inverse_cdf

from dspark_trt.plugins.sequential_head import HeadShape, sequential_head

VOCAB, HIDDEN = 13, 6
LAST_U = np.float32(1 - 2.0**-24)  # the largest number that is drawn
LOGIT_TOLERANCE = {"float32": 1e-5}


def shape_of(
    kind: str = "vanilla", *, rank: int = 4, block: int = 5, confidence: str = "markov"
) -> HeadShape:
    return HeadShape(
        block_size=block,
        rank=0 if kind == "none" else rank,
        kind=kind,
        confidence=confidence != "none",
        confidence_with_markov=confidence == "markov" and kind != "none",
    )


def make_feeds(
    shape: HeadShape, batch: int, *, temperature: float | list[float] = 0.0, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    g, r, e = shape.block_size, shape.rank, HIDDEN
    extra = e + (r if shape.confidence_with_markov else 0)
    sizes = {
        "base_logits": (batch, g, VOCAB), "hidden": (batch, g, e), "w1": (VOCAB, r),
        "w2": (VOCAB, r), "gate_weight": (r, e + r), "gate_bias": (r,),
        "joint_weight": (3 * r, 2 * r + e), "joint_bias": (3 * r,),
        "conf_weight": (1, extra), "conf_bias": (1,),
    }  # fmt: skip
    feeds = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    feeds["anchors"] = rng.integers(0, VOCAB, batch).astype(np.int32)
    feeds["draft_temperature"] = np.broadcast_to(np.float32(temperature), batch).copy()
    feeds["u"] = (rng.integers(0, 2**24, (batch, g)) / 2.0**24).astype(np.float32)
    return {name: feeds[name] for name in shape.inputs}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def bias(
    shape: HeadShape, w: dict[str, np.ndarray], h: np.ndarray, previous: int, state: np.ndarray
) -> tuple[np.ndarray | float, np.ndarray]:
    """bias_k [V] and the next RNN state."""
    if not shape.rank:
        return 0.0, state
    embedded = w["w1"][previous]
    feature = embedded
    if shape.kind == "gated":
        gate = sigmoid(w["gate_weight"] @ np.concatenate([h, embedded]) + w["gate_bias"])
        feature = gate * embedded
    elif shape.kind == "rnn":
        joint = w["joint_weight"] @ np.concatenate([state, embedded, h]) + w["joint_bias"]
        gate, candidate, output = np.split(joint, 3)
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        feature = np.tanh(output)
    return w["w2"] @ feature, state


def check(shape: HeadShape, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits and confidences along the tokens that came out; each token from its own logits."""
    results = run_op(sequential_head(shape), feeds, kind=shape.kind, block_size=shape.block_size)
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    for b, anchor in enumerate(feeds["anchors"]):
        previous, state = int(anchor), np.zeros(shape.rank)
        for k in range(shape.block_size):
            h = wide["hidden"][b, k]
            shift, state = bias(shape, wide, h, previous, state)
            want = wide["base_logits"][b, k] + shift
            row = results["logits"][b, k]
            assert np.abs(row - want).max() < LOGIT_TOLERANCE["float32"]
            feature = h
            if shape.confidence_with_markov:
                feature = np.concatenate([h, wide["w1"][previous]])
            conf = np.inf
            if shape.confidence:
                conf = (wide["conf_weight"] @ feature + wide["conf_bias"])[0]
            assert results["conf_logits"][b, k] == pytest.approx(conf, abs=1e-5)
            law = draft_law(row, float(feeds["draft_temperature"][b]))
            previous = inverse_cdf(law, float(feeds["u"][b, k]))
            assert results["tokens"][b, k] == previous
    return results


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("confidence", ["markov", "plain", "none"])
@pytest.mark.parametrize("rank", [1, 4])
def test_every_head_with_every_confidence(kind: str, confidence: str, rank: int) -> None:
    for block in (1, 2, 7):
        shape = shape_of(kind, rank=rank, block=block, confidence=confidence)
        for temperature in (0.0, 1.0):
            check(shape, make_feeds(shape, 3, temperature=temperature, seed=block))


def test_argmax_and_sampled_rows_share_a_batch() -> None:
    shape = shape_of("rnn")
    temperatures = [0.0, 1.0, 0.3, 0.0, 2.5]
    mixed = check(shape, make_feeds(shape, 5, temperature=temperatures))
    cold = check(shape, make_feeds(shape, 5, temperature=0.0))
    for row in (0, 3):
        assert np.array_equal(mixed["tokens"][row], cold["tokens"][row])


@pytest.mark.parametrize("u", [0.0, LAST_U])
@pytest.mark.parametrize("temperature", [1e-9, 0.7, 1e9])
def test_the_first_and_the_last_number_of_the_range(u: float, temperature: float) -> None:
    shape = shape_of("vanilla")
    feeds = make_feeds(shape, 4, temperature=temperature)
    feeds["u"][:] = u
    results = check(shape, feeds)
    if temperature == 1e-9:
        assert np.array_equal(results["tokens"], results["logits"].argmax(axis=-1))
    else:
        assert np.all(results["tokens"] == (0 if u == 0 else VOCAB - 1))


def test_a_token_without_mass_is_never_drawn() -> None:
    shape = shape_of("none", block=3)
    feeds = make_feeds(shape, 2, temperature=1.0)
    feeds["base_logits"][..., [0, 5, VOCAB - 1]] = -np.inf
    for u in (0.0, LAST_U):
        feeds["u"][:] = u
        function = sequential_head(shape)
        tokens = run_op(function, feeds, kind="none", block_size=3)["tokens"]
        assert np.all(tokens == (1 if u == 0 else VOCAB - 2))


def test_equal_maxima_go_to_the_lowest_id_in_a_large_vocabulary() -> None:
    shape = shape_of("none", block=1, confidence="none")
    vocab = 49152
    logits = np.random.default_rng(0).normal(size=(3, 1, vocab)).astype(np.float32)
    logits[0, 0, [5, 17, vocab - 1]] = 9.0
    logits[1, 0, [4095, 4096, 40000]] = 9.0
    logits[2] = 1.0
    feeds = {
        "base_logits": logits,
        "hidden": np.zeros((3, 1, HIDDEN), np.float32),
        "anchors": np.zeros(3, np.int32),
        "draft_temperature": np.zeros(3, np.float32),
        "u": np.zeros((3, 1), np.float32),
    }
    for threads in (1, 2):
        tokens = run_op(sequential_head(shape), feeds, threads=threads, kind="none", block_size=1)[
            "tokens"
        ]
        assert tokens[:, 0].tolist() == [5, 4095, 0]


def test_an_empty_batch_drafts_nothing() -> None:
    shape = shape_of("gated", block=3)
    results = run_op(sequential_head(shape), make_feeds(shape, 0), kind="gated", block_size=3)
    assert results["tokens"].shape == (0, 3)
    assert results["logits"].shape == (0, 3, VOCAB)


def test_a_confidence_depends_on_earlier_drafts_and_never_on_its_own() -> None:
    """Change the numbers that draw x_3: c_1 .. c_3 stay, c_4 moves."""
    shape = shape_of("vanilla")
    feeds = make_feeds(shape, 6, temperature=3.0)
    before = check(shape, feeds)
    feeds["u"][:, 2] = (feeds["u"][:, 2] + np.float32(0.5)) % 1
    after = check(shape, feeds)
    moved = before["tokens"][:, 2] != after["tokens"][:, 2]
    assert moved.any()
    assert np.array_equal(before["conf_logits"][:, :3], after["conf_logits"][:, :3])
    assert np.all(before["conf_logits"][moved, 3] != after["conf_logits"][moved, 3])


def test_padding_rows_of_nan_leave_the_others_alone() -> None:
    """Five requests in a batch of eight, the three others poisoned."""
    shape = shape_of("rnn")
    feeds = make_feeds(shape, 8, temperature=[0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 1.0, 0.0])
    poisoned = {name: array.copy() for name, array in feeds.items()}
    for name in ("base_logits", "hidden"):
        poisoned[name][5:] = np.nan
    kept = ("base_logits", "hidden", "anchors", "draft_temperature", "u")
    alone = {n: a[:5] if n in kept else a for n, a in feeds.items()}
    want = check(shape, alone)
    function = sequential_head(shape)
    results = run_op(function, poisoned, kind="rnn", block_size=5)
    assert np.array_equal(results["tokens"][:5], want["tokens"])
    assert np.abs(results["logits"][:5] - want["logits"]).max() < LOGIT_TOLERANCE["float32"]
    assert np.all((results["tokens"] >= 0) & (results["tokens"] < VOCAB))
