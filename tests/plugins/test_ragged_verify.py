"""RaggedVerify gives exactly the tokens of `reference.law`, given the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference.law import draft_law, inverse_cdf
from verify_cases import BLOCK, LAST_U, Sequence, check, expected, run, uniforms

VOCAB = 12


def request(
    rng: np.random.Generator,
    *,
    length: int,
    block: int = BLOCK,
    heat: float | None = None,
    vocab: int = VOCAB,
    closeness: float = 1.0,
    **fields: Any,
) -> Sequence:
    """A decoding request whose drafts come from the law their logits claim.

    `closeness` 0 = the drafter knows nothing, 1 = its logits are near the target's.
    """
    logits = rng.normal(size=(length + 1, vocab)) * 2
    noise = rng.normal(size=(block, vocab))
    near = np.zeros((block, vocab))
    near[:length] = logits[:length]
    s = Sequence(
        logits=logits.astype(np.float32),
        draft_logits=(closeness * near + noise).astype(np.float32),
        draft_temperature=heat,
        u_accept=uniforms(rng, block),
        u_recover=float(uniforms(rng, 1)[0]),
        u_bonus=float(uniforms(rng, 1)[0]),
        **fields,
    )
    laws = [draft_law(row, s.heat) for row in s.draft_logits[:length]]
    s.drafts = [inverse_cdf(law, float(uniforms(rng, 1)[0])) for law in laws]
    return s


def chunk(
    rng: np.random.Generator, *, length: int, asked: int, emits: bool, **fields: Any
) -> Sequence:
    return Sequence(
        logits=(rng.normal(size=(asked, VOCAB)) * 2).astype(np.float32),
        chunk_len=length,
        emits=emits,
        u_recover=float(uniforms(rng, 1)[0]),
        u_bonus=float(uniforms(rng, 1)[0]),
        **fields,
    )


def wild_params(rng: np.random.Generator) -> dict[str, Any]:
    """Parameters of a request, each off half of the time."""

    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.5 else neutral

    return {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        "top_k": maybe(int(rng.integers(1, VOCAB + 3)), 0),
        "top_p": maybe(float(rng.uniform(0.05, 1)), 1.0),
        "min_p": maybe(float(rng.uniform(0, 0.5)), 0.0),
        "repetition_penalty": maybe(float(rng.uniform(0.5, 2)), 1.0),
        "presence_penalty": maybe(float(rng.normal()), 0.0),
        "frequency_penalty": maybe(float(rng.normal()), 0.0),
        "penalty_prompt": bool(rng.random() < 0.5),
    }


def history(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "prompt_ids": rng.integers(0, VOCAB, 6).tolist(),
        "output_ids": rng.integers(0, VOCAB, rng.integers(0, 6)).tolist(),
    }


def wild_request(rng: np.random.Generator, block: int = BLOCK) -> Sequence:
    length = int(rng.integers(0, block + 1))
    params = wild_params(rng)
    heat = None if rng.random() < 0.5 or params["temperature"] == 0 else float(rng.choice([0, 0.6]))
    banned = {
        int(k): rng.choice(VOCAB, 3, replace=False).tolist()
        for k in rng.integers(0, block + 1, 2)  # also rows past the length: no such row
    }
    bias = {int(i): float(rng.normal() * 3) for i in rng.choice(VOCAB, 3, replace=False)}
    return request(
        rng, length=length, block=block, heat=heat, params=params, closeness=rng.random() * 1.2,
        banned=banned if rng.random() < 0.4 else {}, bias=bias if rng.random() < 0.4 else {},
        **history(rng),
    )  # fmt: skip


def wild_chunk(rng: np.random.Generator) -> Sequence:
    length = int(rng.integers(1, 5))
    emits = bool(rng.random() < 0.6)
    every = bool(rng.random() < 0.4)
    asked = length if every else int(emits)
    banned = {0: rng.choice(VOCAB, 3, replace=False).tolist(), 2: [1]}
    return chunk(
        rng, length=length, asked=asked, emits=emits, params=wild_params(rng), banned=banned,
        **history(rng),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_sequences_and_parameters(seed: int) -> None:
    rng = np.random.default_rng(seed)
    block = (1, 4, 4, 7)[seed % 4]
    sequences = [wild_chunk(rng) for _ in range(rng.integers(0, 4))]
    sequences += [wild_request(rng, block) for _ in range(rng.integers(1, 12))]
    check(sequences, block=block, padding=int(rng.integers(0, 4)), seed=seed)


@pytest.mark.parametrize("seed", range(10))
def test_an_engine_without_a_drafter_draws_one_token_a_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [wild_chunk(rng) for _ in range(seed % 3)]
    sequences += [
        request(rng, length=0, block=1, params=wild_params(rng), **history(rng)) for _ in range(6)
    ]
    check(sequences, block=0, padding=seed % 2)


@pytest.mark.parametrize("emits", [[True], [False, True], [True, True, False]])
@pytest.mark.parametrize("block", [0, BLOCK])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_of_chunks_alone(emits: list[bool], block: int, temperature: float) -> None:
    rng = np.random.default_rng(len(emits))
    params = {"temperature": temperature}
    sequences = [chunk(rng, length=3, asked=int(e), emits=e, params=params) for e in emits]
    check(sequences, block=block)


@pytest.mark.parametrize("block", [0, BLOCK])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_that_go_on_give_nothing(block: int, temperature: float) -> None:
    """The one row of logits that there always is belongs to nobody; edits of such chunks fall."""
    rng = np.random.default_rng(0)
    one = chunk(rng, length=3, asked=1, emits=False, params={"temperature": temperature})
    assert run([one], block=block) == [[]]
    none = chunk(rng, length=3, asked=0, emits=False, banned={0: [1]}, **history(rng))
    none.params = {"repetition_penalty": 2.0, "top_p": 0.5}
    none.bias = {1: 2.0}
    assert run([none, one], block=block) == [[], []]


def test_context_logits_rows_are_nobodys() -> None:
    rng = np.random.default_rng(5)
    sequences = [
        chunk(rng, length=4, asked=4, emits=False),
        chunk(rng, length=3, asked=3, emits=True),
        *(request(rng, length=n) for n in (0, 4, 2)),
    ]
    for s in sequences[:2]:
        s.logits[:2] = np.nan
    check(sequences)


@pytest.mark.parametrize("nothing_drafted", [False, True])
def test_requests_without_drafts_draw_their_bonus(nothing_drafted: bool) -> None:
    rng = np.random.default_rng(1)
    sequences = [request(rng, length=0) for _ in range(5)]
    sequences[2].params = {"temperature": 0.0}
    check(sequences, nothing_drafted=nothing_drafted)


@pytest.mark.parametrize("u", [0.0, LAST_U])
@pytest.mark.parametrize("temperature", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("heat", [None, 0.0, 1e-9, 1e9])
def test_extreme_numbers_at_extreme_temperatures(
    u: float, temperature: float, heat: float | None
) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        sequences = [
            request(rng, length=n, heat=heat, params={"temperature": temperature})
            for n in (0, 1, 2, 4)
        ]
        for s in sequences:
            s.u_accept[:] = u
            s.u_recover = s.u_bonus = u
        check(sequences)


def test_a_banned_or_filtered_token_is_never_accepted_nor_drawn() -> None:
    """Even where the number is 0, which accepts whatever has mass."""
    rng = np.random.default_rng(2)
    sequences = []
    for params, banned in (({}, {0: [3], 1: [3]}), ({"top_k": 2}, {}), ({"top_p": 0.4}, {})):
        s = request(rng, length=1, params=params, banned=banned)
        s.logits[:, 3] = s.logits.min() - 1 if params else 9.0
        s.drafts = [3]
        s.u_accept[:] = 0.0
        sequences.append(s)
    for tokens in check(sequences):
        assert len(tokens) == 1 and tokens != [3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_go_to_the_lowest_id_everywhere(temperature: float) -> None:
    """Argmax at 0; top-k 1 keeps the lowest of equals at 1."""
    vocab = 49152
    ids = [5, 17, vocab - 1]
    logits = np.zeros((2, vocab), np.float32)
    logits[:, ids] = 9.0
    params = {"temperature": temperature, "top_k": 0 if temperature == 0 else 1}
    sequences = [
        Sequence(
            logits=logits,
            params=params,
            drafts=[draft],
            draft_logits=np.zeros((1, vocab), np.float32),
            draft_temperature=0.0,
            u_accept=np.full(1, 0.5, np.float32),
            u_recover=LAST_U,
            u_bonus=LAST_U,
        )
        for draft in ids
    ]
    assert check(sequences, block=1) == [[5, 5], [5], [5]]


def test_top_k_cuts_among_equals_by_id_and_top_p_reaches_its_mass() -> None:
    row = np.zeros((1, 4), np.float32)
    for params, kept in (
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9_999_999}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0, 1]),
        ({"top_p": 0.6}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 1.0}, [0, 1, 2, 3]),
    ):
        sequences = [Sequence(logits=row, params=params, u_bonus=u) for u in np.arange(64) / 64]
        tokens = check(sequences, block=0)
        assert sorted({t for [t] in tokens}) == kept


def test_greedy_and_sampled_rows_share_a_batch_and_sharp_laws_are_followed() -> None:
    """Every row's argmax has almost all the mass: each must give it, however the rows mix."""
    rng = np.random.default_rng(4)
    sequences = []
    for r in range(8):
        s = request(rng, length=r % 5, heat=0.0)
        s.params = {"temperature": float(r % 2), "top_p": 1 - 0.05 * r}
        s.drafts = rng.integers(0, VOCAB, r % 5).tolist()
        for k, row in enumerate(s.logits):
            row[(r + k) % VOCAB] = 40.0
            if k < s.length and r >= 4:
                s.drafts[k] = (r + k) % VOCAB
            if k < s.length:
                s.draft_logits[k, s.drafts[k]] = 50.0
        sequences.append(s)
    tokens = check(sequences)
    for r, out in enumerate(tokens):
        assert out == [(r + k) % VOCAB for k in range(len(out))]
        assert len(out) == (r % 5 + 1 if r >= 4 else len(out))


def test_penalties_count_each_rows_own_draft_prefix() -> None:
    """The same token drafted four times: each copy lowers its own logit for the rows after it."""
    logits = np.zeros((5, 4), np.float32)
    logits[:, 1], logits[:, 2] = 3.0, 1.5
    s = Sequence(
        logits=logits,
        params={"temperature": 0.0, "frequency_penalty": 1.0},
        drafts=[1, 1, 1, 1],
        draft_logits=np.zeros((4, 4), np.float32),
    )
    assert check([s]) == [[1, 1, 2]]  # 3, 2, then 1 < 1.5
    s.prompt_ids, s.params = [1] * 10, {"temperature": 0.0, "presence_penalty": 1.6}
    assert check([s]) == [[1, 2]]  # ten in the prompt count for nothing at row 0
    s.params = {"temperature": 0.0, "presence_penalty": 1.6, "penalty_prompt": True}
    assert check([s]) == [[2]]


def test_permuting_requests_permutes_what_comes_out() -> None:
    rng = np.random.default_rng(6)
    sequences = [wild_request(rng) for _ in range(8)]
    tokens = check(sequences)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(8)
        assert run([sequences[i] for i in order], seed=seed) == [tokens[i] for i in order]


def test_a_sequence_does_not_feel_its_batch() -> None:
    rng = np.random.default_rng(7)
    sequences = [wild_chunk(rng), wild_chunk(rng), *(wild_request(rng) for _ in range(6))]
    together = check(sequences)
    assert [check([s])[0] for s in sequences if s.chunk_len is None] == together[2:]


def test_nan_in_one_request_stays_with_it_and_names_a_token_that_exists() -> None:
    rng = np.random.default_rng(8)
    for temperature in (0.0, 1.0):
        sequences = [
            request(rng, length=n, params={"temperature": temperature}) for n in (2, 4, 0, 3)
        ]
        want = expected(sequences, BLOCK)
        sequences[1].logits[:] = np.nan
        tokens = run(sequences)
        for r in (0, 2, 3):
            assert tokens[r] == want[r]
