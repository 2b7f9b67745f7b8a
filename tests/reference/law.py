"""What decoding must mean, in float64, slow and obvious.

- `target_law`: the law of the next token after a request's sampling parameters.
- `verify_block`: one verification of a drafted block, from given uniforms.
- `speculative_law`, `plain_law`: the exact joint law of the next tokens of decoding with and
  without a drafter, by enumeration. Lossless means that the two are equal.

A law is an array `[V]` that sums to 1. Every tie goes to the lowest token id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

Law = np.ndarray  # [V] float64
Tokens = tuple[int, ...]
JointLaw = dict[Tokens, float]  # probability of each sequence of n tokens
TargetTable = Callable[[Tokens], Law]  # prefix -> law of the next token
DraftTable = Callable[[Tokens, Tokens], Law]  # (prefix, drafted so far) -> law of the next draft
LengthRule = Callable[[Tokens, Tokens], int]  # (prefix, drafted block) -> l, tokens verified


def softmax(logits: np.ndarray) -> Law:
    """exp(x) / sum(exp(x)); -inf gives 0."""
    shifted = np.asarray(logits, np.float64)
    weights = np.exp(shifted - shifted.max())
    return weights / weights.sum()


def one_hot_argmax(logits: np.ndarray) -> Law:
    """All mass on the largest value, on the lowest id among equals."""
    law = np.zeros(len(logits))
    law[int(np.argmax(logits))] = 1.0  # numpy's argmax is the first maximum
    return law


def edit_logits(
    logits: np.ndarray,  # [V]
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_prompt: bool = False,
    prompt_ids: Iterable[int] = (),
    output_ids: Iterable[int] = (),
    bias: dict[int, float] | np.ndarray | None = None,
    banned: Iterable[int] = (),
) -> np.ndarray:
    """Logits after bias, repetition, presence and frequency penalties and bans, in that order.

    `output_ids` are all tokens after the prompt, the verified row's own draft prefix included.
    Repetition counts prompt and output; presence and frequency count output, and the prompt too
    with `penalty_prompt`.
    """
    edited = np.array(logits, np.float64)
    prompt, output = Counter(prompt_ids), Counter(output_ids)
    if bias is not None:
        for token, value in bias.items() if isinstance(bias, dict) else enumerate(bias):
            edited[token] += value
    for token in set(prompt) | set(output):
        positive = edited[token] > 0
        edited[token] *= 1 / repetition_penalty if positive else repetition_penalty
    for token, count in (prompt + output if penalty_prompt else output).items():
        edited[token] -= presence_penalty + frequency_penalty * count
    for token in banned:
        edited[token] = -np.inf
    return edited


def keep_top_k(law: Law, top_k: int) -> Law:
    """The `top_k` most probable tokens, renormalised; 0 or less keeps all."""
    if top_k <= 0 or top_k >= len(law):
        return law
    return _keep(law, _falling(law)[:top_k])


def keep_top_p(law: Law, top_p: float) -> Law:
    """The fewest most probable tokens whose mass reaches `top_p` (at least one), renormalised."""
    if top_p >= 1.0:
        return law
    kept: list[int] = []
    mass = 0.0
    for token in _falling(law):
        kept.append(token)
        mass += law[token]
        if mass >= top_p:
            break
    return _keep(law, kept)


def keep_min_p(law: Law, min_p: float) -> Law:
    """The tokens with at least `min_p` times the largest probability, renormalised."""
    return _keep(law, [t for t in range(len(law)) if law[t] >= min_p * law.max()])


def _falling(law: Law) -> list[int]:
    """Token ids by falling probability, the lowest id first among equals."""
    return sorted(range(len(law)), key=lambda token: (-law[token], token))


def _keep(law: Law, tokens: Iterable[int]) -> Law:
    kept = np.zeros_like(law)
    for token in tokens:
        kept[token] = law[token]
    return kept / kept.sum()


def target_law(
    logits: np.ndarray,  # [V]
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_prompt: bool = False,
    prompt_ids: Iterable[int] = (),
    output_ids: Iterable[int] = (),
    bias: dict[int, float] | np.ndarray | None = None,
    banned: Iterable[int] = (),
) -> Law:
    """The law of the next token: edited logits, temperature, top-k, top-p, min-p, in that order."""
    edited = edit_logits(
        logits,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        penalty_prompt=penalty_prompt,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        bias=bias,
        banned=banned,
    )
    if np.isneginf(edited).all():
        raise ValueError("every token is banned: no law is left")
    if temperature == 0.0:
        return one_hot_argmax(edited)
    law = softmax(edited / temperature)
    return keep_min_p(keep_top_p(keep_top_k(law, top_k), top_p), min_p)


def draft_law(logits: np.ndarray, draft_temperature: float) -> Law:
    """The law a draft is really drawn from: temperature alone; 0 means argmax, a one-hot law."""
    if draft_temperature == 0.0:
        return one_hot_argmax(logits)
    return softmax(np.asarray(logits, np.float64) / draft_temperature)


def inverse_cdf(law: Law, u: float) -> int:
    """The lowest token id whose cumulative mass exceeds `u` in [0, 1); never one of mass 0."""
    mass = 0.0
    for token, probability in enumerate(law):
        mass += probability
        if probability > 0 and u < mass:
            return token
    return int(np.flatnonzero(law)[-1])  # the sum fell short of 1 by rounding


def residual_law(p: Law, q: Law) -> Law:
    """norm(max(p - q, 0)), the law after a rejection; p itself where p == q (never reached)."""
    excess = np.maximum(p - q, 0.0)
    return excess / excess.sum() if excess.sum() > 0 else p


def verify_block(
    p_rows: Sequence[Law],  # l + 1 laws: row k is the law after [anchor, x_1 .. x_k]
    q_rows: Sequence[Law],  # l laws: row k - 1 is what x_k was drawn from
    draft_tokens: Sequence[int],  # x_1 .. x_l
    u_accept: Sequence[float],  # l uniforms
    u_recover: float,
    u_bonus: float,
) -> list[int]:
    """The tokens that one verification commits: the accepted prefix and one more (1 .. l + 1)."""
    committed: list[int] = []
    for p, q, token, u in zip(p_rows, q_rows, draft_tokens, u_accept):
        if u * q[token] < p[token]:
            committed.append(token)
        else:
            return [*committed, inverse_cdf(residual_law(p, q), u_recover)]
    return [*committed, inverse_cdf(p_rows[len(draft_tokens)], u_bonus)]


def plain_law(p: TargetTable, *, n: int, prefix: Tokens = ()) -> JointLaw:
    """The law of the next `n` tokens of decoding without a drafter."""
    if n == 0:
        return {(): 1.0}
    joint: JointLaw = {}
    for token, chance in _possible(p(prefix)):
        for rest, mass in plain_law(p, n=n - 1, prefix=(*prefix, token)).items():
            joint[(token,) + rest] = chance * mass
    return joint


def block_law(q: DraftTable, *, block_size: int, prefix: Tokens) -> JointLaw:
    """The law of the drafted block x_1 .. x_G."""
    return plain_law(lambda drafted: q(prefix, drafted), n=block_size)


def step_law(p: TargetTable, q: DraftTable, *, block: Tokens, l: int, prefix: Tokens) -> JointLaw:  # noqa: E741
    """The law of what one step commits, given its drafted block and how much of it is verified."""
    joint: JointLaw = {}
    reached = 1.0  # the chance that all drafts before this one were accepted
    for k in range(l):
        before = block[:k]
        p_k, q_k = p(prefix + before), q(prefix, before)
        accept = min(1.0, p_k[block[k]] / q_k[block[k]])
        for token, chance in _possible(residual_law(p_k, q_k)) if accept < 1.0 else ():
            joint[before + (token,)] = reached * (1.0 - accept) * chance
        reached *= accept
    for token, chance in _possible(p(prefix + block[:l])) if reached > 0 else ():
        joint[block[:l] + (token,)] = reached * chance
    return joint


def speculative_law(
    p: TargetTable,
    q: DraftTable,
    *,
    block_size: int,
    n: int,
    length: LengthRule | None = None,
    prefix: Tokens = (),
) -> JointLaw:
    """The law of the next `n` tokens of speculative decoding; `length` defaults to the block.

    A step that commits more than `n` tokens is cut; one that commits fewer is followed by others,
    with fresh numbers. `length` sees the block, so that an anticipating rule can be written down.
    """
    joint: JointLaw = {}
    for block, drawn in block_law(q, block_size=block_size, prefix=prefix).items():
        l = block_size if length is None else length(prefix, block)  # noqa: E741
        for committed, chance in step_law(p, q, block=block, l=l, prefix=prefix).items():
            head = committed[:n]
            joint[head] = joint.get(head, 0.0) + drawn * chance
    return _continued(
        joint,
        n,
        lambda head: speculative_law(
            p, q, block_size=block_size, n=n - len(head), length=length, prefix=prefix + head
        ),
    )


def _continued(joint: JointLaw, n: int, rest_of: Callable[[Tokens], JointLaw]) -> JointLaw:
    """Extend every sequence shorter than `n` by the law of its continuation."""
    full: JointLaw = {}
    for head, mass in joint.items():
        for rest, chance in (rest_of(head) if len(head) < n else {(): 1.0}).items():
            full[head + rest] = full.get(head + rest, 0.0) + mass * chance
    return full


def _possible(law: Law) -> list[tuple[int, float]]:
    return [(token, float(chance)) for token, chance in enumerate(law) if chance > 0]


def distance(a: JointLaw, b: JointLaw) -> float:
    """The largest difference of probability over all sequences."""
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in set(a) | set(b))
