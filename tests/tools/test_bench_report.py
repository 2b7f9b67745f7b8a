"""Interleaved rounds, ratios, agreement and the table, on made-up samples."""

from __future__ import annotations

import math

from dspark_trt.tools.bench_report import (
    PLAIN,
    accepted_by_position,
    agreement,
    curves,
    difference,
    figures,
    ratios,
    table,
    text,
)
from dspark_trt.tools.bench_runs import Answer, ArmResult, Sample, decoded, measure


def sample(rate: float, **fields: object) -> Sample:
    """A sample of `rate` decode tokens a second."""
    return Sample(10, 2.0, 100, 100 / rate, **fields)  # type: ignore[arg-type]


def result(name: str, batch_size: int, *rates: float) -> ArmResult:
    return ArmResult(name, batch_size, [sample(rate) for rate in rates], [])


class FakeArm:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.batch_size, self._log = name, 1, log

    def warm_up(self) -> None:
        self._log.append(f"warm {self.name}")

    def run(self) -> tuple[Sample, list[Answer]]:
        self._log.append(self.name)
        return sample(len(self._log)), [Answer(f"{len(self._log)}", None)]


def test_rounds_are_interleaved_and_turn_about() -> None:
    log: list[str] = []
    begun: list[str] = []
    first, second = measure([FakeArm("a", log), FakeArm("b", log)], 3, begun.append)
    assert log == ["warm a", "warm b", "a", "b", "b", "a", "a", "b"]
    assert begun == ["a x1", "b x1", "b x1", "a x1", "a x1", "b x1"]
    assert len(first.samples) == len(second.samples) == 3
    assert [a.text for a in first.answers] == ["3"]


def test_ratios_pair_the_rounds() -> None:
    results = [
        result("static", 1, 20, 60, 30),
        result(PLAIN, 1, 10, 20, 30),
        result("static", 8, 80, 80, 80),
        result(PLAIN, 8, 40, 80, 90),
        result("peer", 1, 5, 5, 5),
    ]
    found = {(r["of"], r["over"]): r["median"] for r in ratios(results, ["peer"])}
    assert found == {
        ("static x1", "no drafts x1"): 2.0,
        ("static x8", "no drafts x8"): 1.0,
        ("static x1", "peer x1"): 6.0,
        ("no drafts x1", "peer x1"): 4.0,
        ("no drafts x8", "no drafts x1"): 4.0,
    }


def test_a_difference_is_found_where_it_is() -> None:
    assert difference(Answer("abc", [1, 2, 3]), Answer("xyz", [1, 2, 3])) is None
    assert difference(Answer("abc", [1, 2, 3]), Answer("abc", [1, 5, 3])) == 1
    assert difference(Answer("abc", [1, 2, 3]), Answer("abd", None)) == 2
    assert difference(Answer("abc", None), Answer("ab", None)) == 2
    ours = ArmResult("a", 1, [], [Answer("same", None), Answer("one two", None)])
    other = ArmResult("b", 1, [], [Answer("same", None), Answer("one ten", None)])
    found = agreement(ours, other, [1, 7])
    assert (found["equal"], found["prompts"]) == (1, 2)
    assert found["first_difference"] == {"line": 7, "character": 5, "texts": ["one two", "one ten"]}


def test_an_end_token_counts_as_a_step() -> None:
    assert decoded(16, stopped=False) == 15
    assert decoded(16, stopped=True) == 16
    assert decoded(0, stopped=True) == 0
    assert decoded(0, stopped=False) == 0


def test_shares_by_position_are_of_those_verified() -> None:
    rows = [
        sample(1, verified_by_position=[10, 8], accepted_by_position=[5, 2]),
        sample(1, verified_by_position=[10, 0], accepted_by_position=[10, 0]),
    ]
    assert accepted_by_position(ArmResult("x", 1, rows, [])) == [0.75, 0.25]
    assert accepted_by_position(result("x", 1, 1.0)) == []


def test_figures_and_table_hold_with_nothing_timed() -> None:
    empty = ArmResult("x", 1, [Sample(0, 0.0, 0, 0.0)], [])
    values = [v for f in figures(empty).values() for v in f.values()]
    assert all(map(math.isfinite, values))
    assert "x" in table([empty])
    lines = table([result("static", 1, 5), result(PLAIN, 16, 123456)]).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("batch  arm")


def test_one_round_has_no_spread() -> None:
    one, three = table([result("static", 1, 5)]), table([result("static", 1, 5, 6, 7)])
    assert "[5.0 .. 7.0]" in three
    assert ".. " not in one.splitlines()[1]
    record = {
        "settings": {"same_checkpoint": None, "weights": {"engine": "int4", "llama.cpp": "Q4_1"}},
        "ratios": [{"of": "static x1", "over": "llama.cpp x1", "median": 2, "min": 2, "max": 2}],
        "agreement": [],
    }
    line = "decode speed, static x1 (int4 weights) / llama.cpp x1 (Q4_1 weights): 2.00x"
    assert text(record, [result("static", 1, 5)]).splitlines()[-1] == line
    record["settings"]["weights"] = {"engine": "int4"}
    shown = text(record, [result("static", 1, 5, 6)]).splitlines()[-1]
    assert shown == "decode speed, static x1 / llama.cpp x1: 2.00x [2.00 .. 2.00]"


def test_curves_that_coincide_share_a_name() -> None:
    def drafted(name: str, size: int, accepted: int) -> ArmResult:
        row = sample(1, verified_by_position=[10], accepted_by_position=[accepted])
        return ArmResult(name, size, [row], [])

    results = [drafted("static", 1, 5), drafted("static", 8, 5), drafted("threshold", 1, 6)]
    assert curves(results) == {"static x1, static x8": [0.5], "threshold x1": [0.6]}
