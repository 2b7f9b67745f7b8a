"""Deltas join to the decode of the whole, and stop strings cut text and tokens at one place."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.text_stream import TextStream
from dspark_trt.runtime.tokenizer import Tokenizer

RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=3)


def streamed(tokenizer: Tokenizer, ids: list[int], groups: list[int] | None = None) -> list[str]:
    """All deltas, `groups` saying how many ids come at once (repeated as needed)."""
    stream = TextStream(tokenizer)
    deltas, start = [], 0
    sizes = groups or [1]
    for i in range(len(ids)):
        size = sizes[i % len(sizes)]
        deltas.append(stream.push(ids[start : start + size]))
        start += size
    return [*deltas, stream.finish()]


@RELAXED
@given(text=TEXTS, groups=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_joined_deltas_are_the_text(smollm2: Tokenizer, text: str, groups: list[int]) -> None:
    ids = smollm2.encode(text)
    assert "".join(streamed(smollm2, ids, groups)) == smollm2.decode(ids)


@RELAXED
@given(ids=st.lists(st.integers(0, 49151), max_size=24))
def test_random_ids_of_smollm2_stream_as_they_decode(smollm2: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(smollm2, ids)) == smollm2.decode(ids)


@RELAXED
@given(data=st.data())
def test_random_bytes_of_smollm2_stream_as_they_decode(
    smollm2: Tokenizer, data: st.DataObject
) -> None:
    single_bytes = [smollm2.token_id(c) for c in "âĶľÃ©ðŁĺĢAĠíľÄ"]
    ids = data.draw(st.lists(st.sampled_from([i for i in single_bytes if i is not None])))
    assert "".join(streamed(smollm2, ids)) == smollm2.decode(ids)


@RELAXED
@given(data=st.data())
def test_random_ids_of_sentencepiece_stream_as_they_decode(
    sentencepiece: Tokenizer, data: st.DataObject
) -> None:
    some_bytes = [3 + b for b in (0xE4, 0xBD, 0xA0, 0x41, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x20)]
    words = list(range(259, sentencepiece.vocab_size))
    ids = data.draw(st.lists(st.sampled_from([0, 1, 2, *some_bytes, *words]), max_size=20))
    assert "".join(streamed(sentencepiece, ids)) == sentencepiece.decode(ids)
    stream = TextStream(sentencepiece, skip_special_tokens=False)
    text = stream.push(ids) + stream.finish()
    assert text == sentencepiece.decode(ids, skip_special_tokens=False)


def test_a_split_character_is_held_until_it_is_complete(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🦕")
    assert len(ids) > 1
    stream = TextStream(smollm2)
    assert [stream.push([i]) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.push(ids[-1:]) == "🦕"


def test_an_unfinished_character_is_flushed_as_decode_does(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ok 🦕")[:-1]
    deltas = streamed(smollm2, ids)
    assert "\ufffd" not in "".join(deltas[:-1])
    assert "".join(deltas) == smollm2.decode(ids)
    assert deltas[-1].endswith("\ufffd")


def test_the_first_space_of_sentencepiece_is_dropped_once(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the a the", add_special_tokens=False)
    assert "".join(streamed(sentencepiece, [1, *ids, 2])) == "the a the"


def test_ids_beyond_the_tokenizer_add_nothing(smollm2: Tokenizer) -> None:
    ids = [*smollm2.encode("a"), 10**6, *smollm2.encode("b")]
    assert "".join(streamed(smollm2, ids)) == smollm2.decode(ids) == "ab"


def end_by_brute_force(
    tokenizer: Tokenizer, ids: list[int], *, stops: list[str], include: bool, min_tokens: int
) -> tuple[str, int] | None:
    """(text, tokens kept) by decoding every prefix; None where no stop string is met."""
    ends = [len(tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    if len(ids) <= min_tokens:
        return None
    text = tokenizer.decode(ids)
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        starts = [s for s in starts if s >= ends[min_tokens]]
        if starts:
            kept = end if include else min(starts)
            tokens = next(n for n in range(len(ids) + 1) if ends[n] >= kept)
            return text[:kept], max(tokens, min_tokens)
    return None


@settings(RELAXED, max_examples=400)
@given(
    ids=st.lists(st.integers(0, 7), max_size=14),
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    groups=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_stop_strings_end_where_brute_force_says(
    letters: Tokenizer,
    ids: list[int],
    stops: list[str],
    include: bool,
    min_tokens: int,
    groups: list[int],
) -> None:
    stream = TextStream(letters, stop=tuple(stops), include_stop=include, min_tokens=min_tokens)
    start, seen, released = 0, "", 0
    safe: list[int] = []
    for i in range(len(ids)):
        size = groups[i % len(groups)]
        seen += stream.push(ids[start : start + size])
        start += size
        safe.append(stream.released_tokens)
    seen += stream.finish()
    wanted = end_by_brute_force(letters, ids, stops=stops, include=include, min_tokens=min_tokens)
    assert seen == stream.text == stream.take()
    if wanted is None:
        assert stream.match is None
        assert seen == letters.decode(ids)
    else:
        assert stream.match is not None
        assert (stream.text, stream.match.num_tokens) == wanted
        assert stream.match.text_len == len(stream.text)
        released = stream.match.num_tokens
        assert all(a <= released for a in safe)
    assert safe == sorted(safe)


@pytest.mark.parametrize(
    ("include", "text", "tokens"), [(False, "", 0), (True, "\u4f60", 3)], ids=["drop", "keep"]
)
def test_a_stop_string_of_byte_tokens_ends_at_its_last_byte(
    sentencepiece: Tokenizer, include: bool, text: str, tokens: int
) -> None:
    the = sentencepiece.token_id("\u2581the")
    assert the is not None
    stream = TextStream(sentencepiece, stop=("\u4f60",), include_stop=include)
    stream.push([3 + 0xE4, 3 + 0xBD, 3 + 0xA0, the])
    stream.finish()
    assert stream.match is not None
    assert (stream.text, stream.match.num_tokens) == (text, tokens)


def test_a_stop_string_that_only_the_flush_completes_is_found(sentencepiece: Tokenizer) -> None:
    stream = TextStream(sentencepiece, stop=("\u4f60",))
    assert stream.push([3 + 0xE4, 3 + 0xBD, 3 + 0xA0]) == ""
    assert stream.match is None
    assert stream.finish() == ""
    assert stream.match is not None
    assert stream.match.num_tokens == 0


def test_a_stop_string_across_token_borders_is_held_back_and_cut(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Answer: 4\nQuestion: what now")
    stream = TextStream(smollm2, stop=("\nQuestion:",))
    deltas = [stream.push([i]) for i in ids]
    assert "".join(deltas) == "Answer: 4"
    assert stream.match is not None
    assert smollm2.decode(ids[: stream.match.num_tokens]) == "Answer: 4"


def test_text_held_for_a_stop_string_comes_when_it_does_not_follow(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one\n\ntwo\n\n")
    stream = TextStream(smollm2, stop=("\n\n\n",))
    assert "".join(stream.push([i]) for i in ids) == "one\n\ntwo"
    assert stream.finish() == "\n\n"


def test_cost_per_token_does_not_grow(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The quick brown fox jumps over the lazy dog. ") * 1200
    stream = TextStream(smollm2, stop=("###", "\n\nHuman:"))
    quarter = len(ids) // 4

    def seconds(part: list[int]) -> float:
        began = time.perf_counter()
        for id_ in part:
            stream.push([id_])
        return time.perf_counter() - began

    times = [seconds(ids[i * quarter : (i + 1) * quarter]) for i in range(4)]
    assert times[3] < 3 * times[0] + 0.05
    assert min(times) / quarter < 200e-6
