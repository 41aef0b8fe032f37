"""Checks of a user's numbers, texts and keys: every boundary from both sides."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal

import numpy as np
import pytest

from lightning_dataflex.core import checks
from lightning_dataflex.core.block import check_keys, check_values, is_path
from lightning_dataflex.core.checks import check_finite, check_nesting, check_range, check_whole, is_number, is_whole
from lightning_dataflex.functional.choices import check_choice, shown

INF, NAN = float("inf"), float("nan")
LARGEST = sys.float_info.max


@pytest.mark.parametrize("value", [0, -3, 0.5, LARGEST, -LARGEST, np.float32(2), np.int64(2)])
def test_numbers(value: Any) -> None:
    assert is_number(value)
    assert check_finite("x", value) is None


@pytest.mark.parametrize(
    "value",
    [True, False, NAN, INF, -INF, np.float32(INF), np.float16(NAN), np.bool_(True), 10**309, "1", None, [1], 1j],
)
def test_what_is_no_number(value: Any) -> None:
    assert not is_number(value)
    with pytest.raises(ValueError, match=r"^target is .*Give a number"):
        check_finite("target", value)


def test_whole_numbers() -> None:
    assert [is_whole(value) for value in (0, -1, np.int64(3), 2**70)] == [True] * 4
    assert [is_whole(value) for value in (True, 1.0, "1", None)] == [False] * 4


def accepted(check: Any, *args: Any, **settings: Any) -> bool:
    try:
        check(*args, **settings)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("value", "closed", "open_low"),
    [
        (-0.1, False, False),
        (0, True, False),
        (1e-9, True, True),
        (1, True, True),
        (1.1, False, False),
        (NAN, False, False),
    ],
)
def test_ranges_have_ends(value: float, closed: bool, open_low: bool) -> None:
    assert accepted(check_range, "x", value, 0, 1) == closed
    assert accepted(check_range, "x", value, 0, 1, open_low=True) == open_low


@pytest.mark.parametrize(
    ("low", "high", "open_low", "shown_as"),
    [
        (0, 1, False, r"\[0, 1\]"),
        (0, 1, True, r"\(0, 1\]"),
        (-INF, 1, False, r"\(-inf, 1\]"),
        (0, INF, False, r"\[0, inf\)"),
    ],
)
def test_an_end_that_is_never_reached_has_a_round_bracket(
    low: float, high: float, open_low: bool, shown_as: str
) -> None:
    with pytest.raises(ValueError, match=rf"^x is 'a'. It must be in {shown_as}"):
        check_range("x", "a", low, high, open_low=open_low)


def test_whole_numbers_have_a_least_and_a_most() -> None:
    assert [accepted(check_whole, "k", value, 1, 3) for value in (0, 1, 3, 4, 1.0, True)] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert accepted(check_whole, "k", 2**63 - 1, 1)
    with pytest.raises(ValueError, match=rf"^k is {2**63}. It must be a whole number of at most {2**63 - 1}"):
        check_whole("k", 2**63, 1)


def nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_parameters_are_nested_32_deep_at_most(kind: type) -> None:
    assert accepted(check_nesting, "params", nested(32, kind))
    assert not accepted(check_nesting, "params", nested(33, kind))


def test_parameters_have_so_many_entries_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_ENTRIES", 5)
    assert accepted(check_nesting, "params", [[0, 0, 0], 0])
    with pytest.raises(ValueError, match=r"^params has more than 5 entries\. Give fewer"):
        check_nesting("params", [[0, 0, 0, 0], 0])


def test_nothing_beside_it_hides_what_is_nested_too_deep() -> None:
    deep = nested(40, list)
    for value in ([deep, 1], [1, deep], {"a": deep, "b": 1}, {"a": 1, "b": deep}):
        assert not accepted(check_nesting, "params", value)


def test_values_are_shown_up_to_200_characters() -> None:
    assert shown("a" * 198) == repr("a" * 198)
    assert shown("a" * 199) == "'" + "a" * 199 + "..."
    assert accepted(check_choice, "agg", "mean", Literal["mean", "sum"])
    assert not accepted(check_choice, "agg", ["mean"], Literal["mean", "sum"])


# -- the keys of a block ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["loss", "losses.policy", "_a.b1"])
def test_paths(path: str) -> None:
    assert is_path(path)


@pytest.mark.parametrize("path", ["", "a..b", "__class__", "a.__class__", "a b", "1a", "a()", 3, None])
def test_what_is_no_path(path: Any) -> None:
    assert not is_path(path)


def test_keys_are_those_of_a_dataclass() -> None:
    @dataclasses.dataclass
    class Keys:
        low: int
        high: int

    assert check_keys("The block", {"low": 1}, Keys) is None
    with pytest.raises(ValueError, match=r"^The block has no key 'lwo'. Did you mean 'low'\? Known: low, high"):
        check_keys("The block", {"high": 1, "lwo": 1}, Keys)


GOOD = {
    "mechanism": ["select", "reweight", "mix"],
    "drop": ["mask", "rows", "weight"],
    "on_empty": ["skip", "keep", "raise"],
    "scope": ["global", "rank"],
    "warmup_step": [0, 1],
    "update_step": [1, 2],
    "enforce": [True, False],
    "trim": [False],
    "shared_fields": [None, [], ["a"], ("a", "b")],
    "token_fields": [None, [], ["a"], ("a", "b")],
    "fields": [None, {}, {"rm_scores": "rewards"}, {"rollout_is_weights": "w"}],
    "weights_key": ["rollout_is_weights", "w"],
    "domains": [None, ["a", 1], ("a",), {"a": 1}],
    "mount": [None, "point", "a.b"],
    "label": [None, "a", "two words"],
    "adv_estimator": [None, "grpo"],
}
BAD = {
    "mechanism": ["Select", None, ["select"]],
    "drop": ["row", True],
    "on_empty": ["", 1],
    "scope": ["ranks", None],
    "warmup_step": [-1, 0.0, True, None],
    "update_step": [0, 1.0, True],
    "enforce": [1, None, "true"],
    "trim": [0, None, "true", True],
    "shared_fields": ["a", [1], {"a": 1}, ["a", None]],
    "token_fields": ["a", [1], {"a": 1}, ["a", None]],
    "fields": [[], "a", {"a": 1}, {1: "a"}, {"a": "b", "c": None}],
    "weights_key": ["", None, 1, "original_w", "rm_scores", "uid", "response_mask"],
    "domains": ["a", [None], [1.0], [True], {True: 1}, 3],
    "mount": ["", "a()", "__class__", 3],
    "label": ["", "  ", "a\nb", 3],
    "adv_estimator": ["grpoo", 3],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in GOOD.items() for value in values])
def test_values_that_a_key_takes(key: str, value: Any) -> None:
    assert check_values({key: value}) is None


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_values_that_a_key_does_not_take(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{key} is "):
        check_values({key: value})


def test_trim_goes_with_rows_alone() -> None:
    assert check_values({"trim": True, "drop": "rows"}) is None
    for block, drop in (({}, "mask"), ({"drop": "weight"}, "weight")):
        with pytest.raises(ValueError, match=rf"^trim is true, but drop is '{drop}'. Only drop: rows changes shapes"):
            check_values(block | {"trim": True})


def test_weights_do_not_go_where_another_field_is() -> None:
    assert check_values({"weights_key": "w", "fields": {"rollout_is_weights": "w"}}) is None
    with pytest.raises(
        ValueError, match=r"^weights_key is 'w'. Give the name of a field that holds nothing but weights"
    ):
        check_values({"weights_key": "w", "fields": {"rm_scores": "w"}})
    with pytest.raises(ValueError, match=r"^weights_key is 'rollout_is_weights'"):
        check_values({"fields": {"rm_scores": "rollout_is_weights"}})
