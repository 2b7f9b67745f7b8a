"""The options of `dspark train`, and what they become."""

from __future__ import annotations

from dspark_trt.tools.train.command import arguments


def test_lists_take_one_word_and_leave_the_next_alone() -> None:
    asked = arguments().parse_args(
        ["--feature-layers=-1,3", "--temperatures", "0,1", "--user-temperatures", "0.5"]
    )
    assert asked.feature_layers == [-1, 3]
    assert (asked.temperatures, asked.user_temperatures) == ([0.0, 1.0], [0.5])
    assert all(action.nargs in (None, 0) for action in arguments()._actions)


def test_lists_have_defaults_that_are_parsed_alike() -> None:
    asked = arguments().parse_args([])
    assert asked.temperatures == [0.0, 0.7, 1.0]
    assert asked.user_temperatures == [0.7, 0.9, 1.0]
    assert asked.feature_layers is None
