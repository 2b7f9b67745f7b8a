"""The Python API: what it takes, what it gives back, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import BLOCK, GREEDY, PROMPTS, VOCAB, ids, plain, texts

from dspark_trt.runtime.budget import NoDraft, PolicyError, Static, Threshold
from dspark_trt.runtime.engine_dir import EngineDirError
from dspark_trt.runtime.llm import LLM, RequestError, SamplingParams


def test_texts_and_ids_mean_the_same(llm: LLM) -> None:
    text = "the old mill"
    encoded = llm.tokenizer.encode(text)
    (by_text,) = llm.generate(text, GREEDY)
    (by_ids,) = llm.generate(encoded, GREEDY)
    both = llm.generate([text, encoded], GREEDY)
    arrays = llm.generate([np.array(encoded)], GREEDY)
    for done in (by_ids, *both, *arrays):
        assert (done.prompt_ids, done.token_ids) == (encoded, by_text.token_ids)
    assert by_text.text == llm.tokenizer.decode(by_text.token_ids)


def test_one_set_of_params_for_all_or_one_each(llm: LLM) -> None:
    assert [len(t) for t in texts(llm.generate(PROMPTS, SamplingParams(max_tokens=3)))] == [3] * 6
    each = [SamplingParams(max_tokens=n) for n in (1, 5, 2)]
    assert [len(t) for t in texts(llm.generate(PROMPTS[:3], each))] == [1, 5, 2]
    assert llm.generate([], SamplingParams()) == []
    assert (
        len(llm.generate(PROMPTS[0])[0].token_ids) == 121
    )  # 128 by default, less the context's end


def test_n_sequences_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, n=3, ignore_eos=True)
    done = llm.generate(PROMPTS[:2], params)
    assert [(c.prompt_ids, c.sequence_index) for c in done] == [
        (prompt, i) for prompt in PROMPTS[:2] for i in range(3)
    ]
    assert len({tuple(c.token_ids) for c in done}) == 6  # each with random numbers of its own
    assert texts(llm.generate(PROMPTS[:2], params)) == texts(done)
    greedy = llm.generate(PROMPTS[0], SamplingParams(max_tokens=9, n=2))
    assert greedy[0].token_ids == greedy[1].token_ids


def test_the_seed_and_the_prompt_choose_the_numbers(llm: LLM) -> None:
    def text(seed: int) -> list[int]:
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        return llm.generate(PROMPTS[0], params)[0].token_ids

    assert text(1) == text(1) != text(2)


def test_chat_is_generate_on_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the old mill"}]
    prompt = "<|bos|><|user|>the old mill<|eos|><|assistant|>"
    encoded = llm.tokenizer.encode(prompt, add_special_tokens=False)
    assert llm.chat_prompt(messages) == encoded
    (done,) = llm.chat(messages, GREEDY)
    assert done.prompt_ids == encoded
    assert done.token_ids == llm.generate([encoded], GREEDY)[0].token_ids
    two = llm.chat([messages, [*messages, *messages]], GREEDY)
    assert two[0].token_ids == done.token_ids
    assert len(two[1].prompt_ids) > len(encoded)


def test_progress_counts_up_to_all(llm: LLM) -> None:
    calls: list[tuple[int, int]] = []
    llm.generate(PROMPTS, SamplingParams(max_tokens=4), progress=lambda *c: calls.append(c))
    assert calls == sorted(set(calls))
    assert calls[-1] == (6, 6)


def test_an_engine_without_a_drafter_gives_the_same_text(
    llm: LLM, pair_engine: Path, tmp_path: Path
) -> None:
    from tiny_engine import tiny_engine

    target = pair_engine.parent / "markov-llama-target"
    alone = LLM(tiny_engine(tmp_path / "engine", target), threads=1)
    assert isinstance(alone.engine.policy, NoDraft)
    assert isinstance(llm.engine.policy, Static)
    assert texts(alone.generate(PROMPTS, GREEDY)) == texts(llm.generate(PROMPTS, GREEDY))
    done = alone.generate(PROMPTS[0], SamplingParams(max_tokens=9, temperature=1.0))[0]
    assert done.accepted_lengths == [1] * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_deltas_join_to_the_whole(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], params)
    deltas = list(llm.stream(PROMPTS[0], params))
    assert "".join(d.text for d in deltas) == whole.text
    assert [i for d in deltas for i in d.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) < 40  # several tokens at once
    assert [d.completion is None for d in deltas] == [True] * (len(deltas) - 1) + [False]


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100))
    next(stream)
    assert not llm.engine.batcher.idle
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.batcher.idle and llm.pool.num_free == llm.pool.capacity
    for _ in llm.stream(PROMPTS[0], SamplingParams(max_tokens=100)):
        break
    assert llm.engine.batcher.idle


def test_a_stream_that_is_never_read_takes_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert llm.engine.batcher.idle
    del stream


def test_two_streams_and_a_batch_at_once(llm: LLM) -> None:
    expected = plain(llm, PROMPTS[:3], GREEDY)
    streams = [llm.stream(p, GREEDY) for p in PROMPTS[:2]]
    got: list[list[int]] = [[], []]

    def read(i: int, stream: Iterator[Any]) -> None:
        got[i] += next(stream).token_ids

    for _ in range(3):
        for i, stream in enumerate(streams):
            read(i, stream)
    assert texts(llm.generate([PROMPTS[2]], GREEDY)) == expected[2:]
    for i, stream in enumerate(streams):
        got[i] += [token for delta in stream for token in delta.token_ids]
    assert got == expected[:2]


def test_stream_of_nothing(llm: LLM) -> None:
    (only,) = llm.stream(PROMPTS[0], SamplingParams(max_tokens=0))
    assert (only.text, only.token_ids, only.finish_reason) == ("", [], "length")


def test_logprobs_are_the_same_with_and_without_drafts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, logprobs=3, ignore_eos=True)
    drafted = llm.generate(PROMPTS, params)
    llm.engine.policy = NoDraft()
    for ours, theirs in zip(drafted, llm.generate(PROMPTS, params)):
        assert ours.logprobs is not None and theirs.logprobs is not None
        assert [p.token_id for p in ours.logprobs] == ours.token_ids == theirs.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_top_logprobs_fall_and_sum_below_one(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, logprobs=5, temperature=temperature, ignore_eos=True)
    (done,) = llm.generate(PROMPTS[0], params)
    assert done.logprobs is not None
    for position in done.logprobs:
        values = [v for _, v in position.top]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert sum(np.exp(values)) < 1.0
        assert position.logprob <= values[0] < 0
        if temperature == 0:
            assert position.top[0] == (position.token_id, position.logprob)
        for token, value in position.top:
            assert token != position.token_id or value == position.logprob


def test_logprobs_of_zero_have_the_token_alone(llm: LLM) -> None:
    (done,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=5, logprobs=0))
    assert done.logprobs is not None
    assert [p.top for p in done.logprobs] == [()] * 5
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=5))[0].logprobs is None


def test_logits_of_context_and_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, logprobs=0, ignore_eos=True)
    prompts = [ids(100, 3), *PROMPTS[:3]]  # the first in two chunks
    done = llm.generate(prompts, params, return_context_logits=True, return_generation_logits=True)
    for completion in done:
        context, output = completion.context_logits, completion.generation_logits
        assert context is not None and output is not None and completion.logprobs is not None
        assert context.shape == (len(completion.prompt_ids), VOCAB)
        assert output.shape == (len(completion.token_ids), VOCAB)
        assert context.dtype == output.dtype == np.float32
        np.testing.assert_array_equal(context[-1], output[0])
        assert output.argmax(axis=1).tolist() == completion.token_ids
        law = output - np.log(np.exp(output.astype(np.float64)).sum(axis=1, keepdims=True))
        ours = [p.logprob for p in completion.logprobs]
        mine = law[np.arange(len(law)), completion.token_ids]
        np.testing.assert_allclose(ours, mine, atol=1e-5)


def test_logits_are_raw_whatever_the_sampling(llm: LLM) -> None:
    first = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1), return_generation_logits=True)
    params = SamplingParams(max_tokens=1, temperature=0.3, top_k=2, logit_bias={9: 50.0})
    other = llm.generate(PROMPTS[0], params, return_generation_logits=True)
    assert other[0].token_ids == [9]
    assert first[0].generation_logits is not None and other[0].generation_logits is not None
    np.testing.assert_array_equal(first[0].generation_logits, other[0].generation_logits)


def test_no_tokens_have_no_logits(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, logprobs=1)
    (done,) = llm.generate(PROMPTS[0], params, return_generation_logits=True)
    assert (done.token_ids, done.logprobs, done.text) == ([], [], "")
    assert done.generation_logits is not None and done.generation_logits.shape == (0, VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_lengths_add_up(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    done = llm.generate(PROMPTS, params)
    for completion in done:
        lengths, uncut = completion.accepted_lengths, completion.accepted_lengths_uncut
        assert 1 + sum(lengths) == len(completion.token_ids) == 40
        assert all(1 <= n <= BLOCK + 1 for n in uncut)
        assert lengths[:-1] == uncut[: len(lengths) - 1] and lengths[-1] <= uncut[-1]
    steps = [n for completion in done for n in completion.accepted_lengths_uncut]
    metrics = llm.engine.metrics
    assert metrics.mean_accepted_length == pytest.approx(np.mean(steps))
    assert metrics.decode_tokens == sum(steps)
    assert metrics.accepted_by_position[0] == sum(n > 1 for n in steps)
    assert metrics.prefill_tokens == sum(len(p) for p in PROMPTS)
    assert 0 <= metrics.host_seconds <= metrics.decode_seconds


FINE = SamplingParams(max_tokens=2)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "empty text": ("", FINE, r"prompt must be text of at least one token, got ''"),
    "empty ids": ([[]], FINE, r"prompt must be at least one token"),
    "one empty among good ones": ([[5], []], FINE, r"prompt must be at least one token"),
    "too long": (ids(128), FINE, r"Prompt length \(128\) exceeds maximum input length \(127\)"),
    "id too large": ([[5, 128]], FINE, r"prompt_ids\[1\] must be in \[0, 128\), got 128"),
    "id below zero": ([[-1]], FINE, r"prompt_ids\[0\] must be in \[0, 128\), got -1"),
    "float id": ([[1.5]], FINE, r"prompt must be a flat list of integer ids"),
    "nested ids": ([[[1]]], FINE, r"prompt must be a flat list of integer ids"),
    "text within ids": ([["a", 3]], FINE, r"prompt must be a flat list of integer ids"),
    "bytes": (b"abc", FINE, r"prompts must be a text, a list of texts or of token ids"),
    "bytes in a list": ([b"abc"], FINE, r"prompt must be text or a list of token ids"),
    "a number": (5, FINE, r"prompts must be a text, a list of texts"),
    "nothing": (None, FINE, r"prompts must be a text, a list of texts"),
    "nothing in a list": ([None], FINE, r"prompt must be text or a list of token ids"),
    "lone surrogate": ("\ud800", FINE, r"prompt must be valid Unicode"),
    "params for another count": (
        [[5], [6]],
        [FINE],
        r"params are given for 1 prompts, there are 2",
    ),
    "params of a wrong type": ([[5]], {"top_k": 1}, r"params must be SamplingParams"),
    "stop id": ([[5]], SamplingParams(stop_token_ids=[128]), r"stop_token_ids must be ids below"),
    "bias id": ([[5]], SamplingParams(logit_bias={300: 1.0}), r"logit_bias must be ids below 128"),
    "bad word id": ([[5]], SamplingParams(bad_words=[[3, 128]]), r"bad_words must be ids below"),
}


@pytest.mark.parametrize("prompts, params, message", REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_runs(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert llm.engine.metrics.steps == 0


def test_a_stream_has_one_sequence(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n must be 1 in a stream, got 2"):
        llm.stream(PROMPTS[0], SamplingParams(n=2))
    with pytest.raises(RequestError, match="prompt must be text of at least one token"):
        llm.stream("")


def test_logits_need_an_engine_built_for_them(pair_engine: Path, tmp_path: Path) -> None:
    from tiny_engine import tiny_engine

    target = pair_engine.parent / "markov-llama-target"
    engine = tiny_engine(
        tmp_path / "e", target, gather_context_logits=False, gather_generation_logits=False
    )
    llm = LLM(engine, threads=1)
    with pytest.raises(RequestError, match="built without --gather-context-logits"):
        llm.generate([[5]], return_context_logits=True)
    with pytest.raises(RequestError, match="built without --gather-generation-logits"):
        llm.generate([[5]], return_generation_logits=True)
    assert len(llm.generate([[5]], SamplingParams(max_tokens=2, logprobs=1))[0].token_ids) == 2


@pytest.mark.parametrize("pages", [0, -3])
def test_a_cache_has_pages(pair_engine: Path, pages: int) -> None:
    with pytest.raises(RequestError, match=f"kv_pages must be an integer >= 1, got {pages}"):
        LLM(pair_engine, kv_pages=pages)


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "pages of a wrong type": ({"kv_pages": 2.5}, "kv_pages must be an integer >= 1, got 2.5"),
    "pages as a bool": ({"kv_pages": True}, "kv_pages must be an integer >= 1, got True"),
    "threads below zero": ({"threads": -1}, r"threads must be an integer in \[0, 1024\], got -1"),
    "too many threads": ({"threads": 1025}, r"threads must be an integer in \[0, 1024\]"),
    "threads as a text": ({"threads": "2"}, r"threads must be an integer in \[0, 1024\], got '2'"),
    "a policy's name": ({"policy": "static"}, "policy must be a policy object, got 'static'"),
    "a policy's class": ({"policy": Threshold}, "policy must be a policy object"),
}


@pytest.mark.parametrize("arguments, message", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_are_checked(pair_engine: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        LLM(pair_engine, **arguments)
    assert isinstance(raised.value, (RequestError, PolicyError))


def test_confidences_are_not_to_be_had_from_every_engine(pair_engine: Path, tmp_path: Path) -> None:
    from factories import tiny_drafter
    from tiny_engine import tiny_engine

    target = pair_engine.parent / "markov-llama-target"
    mute = tiny_engine(tmp_path / "mute", target, tiny_drafter(tmp_path, target, confidence=None))
    with pytest.raises(PolicyError, match="'threshold' needs .* its drafter has none"):
        LLM(mute, policy=Threshold(0.5))
    alone = tiny_engine(tmp_path / "alone", target)
    with pytest.raises(PolicyError, match="'threshold' needs .* it has no drafter"):
        LLM(alone, policy=Threshold(0.5))
    LLM(pair_engine, policy=Threshold(0.5), threads=1)


def test_a_short_generate_does_not_wait_for_a_long_stream(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    before = llm.engine.metrics.steps
    llm.generate([[5]], SamplingParams(max_tokens=1))
    assert llm.engine.metrics.steps == before + 1
    assert sum(len(delta.token_ids) for delta in stream) == 99


def test_progress_counts_what_a_nested_call_finished(llm: LLM) -> None:
    llm.engine.policy = NoDraft()  # one token a step
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        if done == 1:  # this steps all others to their end
            llm.generate([[7]], SamplingParams(max_tokens=100, ignore_eos=True))

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5, 9)]
    llm.generate(PROMPTS[:3], params, progress=progress)
    assert calls == [0, 1, 3]


def test_a_stream_takes_one_prompt(llm: LLM) -> None:
    for prompts in (["a", "b"], [[5], [6]], [np.array([5])]):
        with pytest.raises(RequestError, match="one text or flat list of ids in a stream"):
            llm.stream(prompts)  # type: ignore[arg-type]
    assert list(llm.stream(np.array([5]), SamplingParams(max_tokens=1)))  # type: ignore[arg-type]


def test_what_the_context_cut_says_so(llm: LLM) -> None:
    cut, whole, exact = llm.generate(
        [ids(120), ids(120), ids(120)],
        [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 3, 8)],
    )
    assert [c.context_limited for c in (cut, whole, exact)] == [True, False, False]
    assert {c.finish_reason for c in (cut, whole, exact)} == {"length"}


def test_bans_of_every_token_are_refused(llm: LLM) -> None:
    every = [[i] for i in range(VOCAB)]
    for bad_words, more in ((every, {}), (every[:-1], {"stop_token_ids": [VOCAB - 1]})):
        params = SamplingParams(bad_words=bad_words, min_tokens=len(more), **more)
        with pytest.raises(RequestError, match=f"must leave a token to draw, they ban all {VOCAB}"):
            llm.generate([[5]], params)
    (done,) = llm.generate([[5]], SamplingParams(bad_words=every[:-1], max_tokens=3))
    assert done.token_ids == [VOCAB - 1] * 3


def test_a_page_size_that_is_not_the_graphs_is_refused(pair_engine: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(pair_engine, engine)
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["page_size"] *= 2
    (engine / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineDirError, match="page_size is 16 in the manifest and 8"):
        LLM(engine)
