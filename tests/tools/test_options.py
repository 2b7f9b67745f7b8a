"""What an option takes, and what it says of the rest."""

from __future__ import annotations

import argparse

import pytest

from dspark_trt.tools.options import integers, number, numbers


def test_lists_are_joined_by_commas() -> None:
    assert integers(-1)("-1,3,7") == [-1, 3, 7]
    assert numbers(0, 4)("0,0.7,1e0") == [0.0, 0.7, 1.0]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-0.1", "4.1", "x", "", "1 2"])
def test_a_number_out_of_its_bounds_is_refused_with_bound_and_value(text: str) -> None:
    for parse in (number(0, 4), numbers(0, 4)):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            parse(text)
        assert str(caught.value).startswith("must be a number in [0, 4], got ")
        assert text in str(caught.value)


def test_a_number_without_an_upper_bound_is_finite() -> None:
    assert number(0)("1e300") == 1e300
    with pytest.raises(argparse.ArgumentTypeError, match=r"^must be a number >= 0, got inf$"):
        number(0)("inf")


@pytest.mark.parametrize("text", ["1,,2", ",1", "1,x", "-2"])
def test_a_list_with_a_part_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be an integer >= -1, got"):
        integers(-1)(text)
