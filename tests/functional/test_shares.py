"""Proportions and the rules that make them, each against its formula in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import mixing, other_mixing, proportions
from tests.exact import close, doubles

NAN, INF = float("nan"), float("inf")


# -- proportions -------------------------------------------------------------------------------------------------------


def test_shares_of_nothing_are_equal() -> None:
    assert proportions.normalised(torch.zeros(4)).tolist() == [0.25] * 4
    assert proportions.normalised(torch.tensor([1, 3])).tolist() == [0.25, 0.75]
    close(proportions.boltzmann(doubles(0, 1, 3), 2.0), np.exp([0, 0.5, 1.5]) / np.exp([0, 0.5, 1.5]).sum())


@pytest.mark.parametrize("floor", [0.0, 0.05, 0.1, 0.2, 0.24, 0.25])
def test_water_is_filled_up_to_the_floor(floor: float) -> None:
    shares = np.array([0.7, 0.18, 0.1, 0.02])
    expected, low = shares.copy(), np.zeros(4, bool)
    # One domain at a time, the smallest first.
    for i in np.argsort(shares):
        if expected[i] < floor:
            low[i] = True
            rest = np.where(low, 0, shares)
            expected = np.where(low, floor, rest / max(rest.sum(), 1e-300) * (1 - low.sum() * floor))
    close(proportions.floored(doubles(*shares), floor), expected)
    close(proportions.floored(doubles(*shares), floor, "mixture"), floor + (1 - 4 * floor) * shares)


def test_a_floor_is_one_that_all_can_have() -> None:
    assert proportions.check_floor(0.0, 3) is None
    assert proportions.check_floor(1 / 3, 3) is None
    assert proportions.check_floor(0.1, 10) is None
    for floor in (-1e-9, NAN, 0.34, 1 / 3 + 1e-9):
        with pytest.raises(ValueError, match=rf"^floor is {floor} for 3 domains, .* Use a floor of 0 to 0\.333333"):
            proportions.check_floor(floor, 3)
    assert proportions.check_method("mixture") is None
    with pytest.raises(ValueError, match=r"^floor_by is 'water'\. Use one of water_filling, mixture"):
        proportions.check_method("water")


@pytest.mark.parametrize(
    ("saved", "domains", "expected"),
    [
        ({"a": 0.6, "b": 0.3}, ["b", "a"], {"b": 0.3, "a": 0.6}),
        ({"a": 0.6, "b": 0.4}, ["a"], {"a": 1.0}),
        ({"a": 0.6, "b": 0.2, "c": 0.2}, ["b", "a"], {"b": 0.25, "a": 0.75}),
        ({"a": 0.6, "b": 0.4}, ["a", "b", "c", "d"], {"a": 0.3, "b": 0.2, "c": 0.25, "d": 0.25}),
        ({"a": 1.0}, ["b", "c"], {"b": 0.5, "c": 0.5}),
        ({"a": 0.0, "b": 1.0}, ["a", "c"], {"a": 0.5, "c": 0.5}),
    ],
)
def test_proportions_of_other_domains(saved: Any, domains: list[str], expected: dict[str, float]) -> None:
    got = proportions.matched(saved, domains)
    assert list(got) == domains
    assert got == pytest.approx(expected)


def test_what_is_owed_is_given_in_time() -> None:
    shares, given = doubles(0.62, 0.3, 0.08), np.zeros(3)
    owed = torch.zeros(3, dtype=torch.float64)
    for turn in range(50):
        whole = proportions.apportioned(shares, 2, turn, owed)
        assert (whole.dtype, int(whole.sum()), int(whole.min()) >= 0) == (torch.int64, 2, True)
        owed += shares * 2 - whole
        given += whole.numpy()
        assert float(owed.abs().max()) <= 1 + 1e-9
    close(given, [62, 30, 8], atol=1)
    assert proportions.apportioned(shares, 0).tolist() == [0, 0, 0]
    # Rounding below a whole number takes nothing from it, and equal remainders take turns.
    assert proportions.apportioned(doubles(0.3 - 1e-11, 0.7), 10).tolist() == [3, 7]
    assert [proportions.apportioned(doubles(0.5 + 1e-12, 0.5), 1, turn).tolist() for turn in range(3)] == [
        [1, 0],
        [0, 1],
        [1, 0],
    ]
    # More was given than there is: those who have some give it back, the smallest remainder first.
    assert proportions.apportioned(doubles(0.5, 0.5, 0), 2, owed=doubles(0.9, 0.8, -0.9)).tolist() == [1, 1, 0]
    assert proportions.apportioned(doubles(0.0, 0.5, 0.5), 2, owed=doubles(-0.95, 0.05, 0.9)).tolist() == [0, 1, 1]


# -- mixing ------------------------------------------------------------------------------------------------------------


def test_gaps_are_to_the_best_and_what_is_unknown_has_the_largest() -> None:
    gaps = np.array([0, 0.4, 0.8, 0.8])
    close(mixing.reward_gap(doubles(0.9, 0.5, 0.1, NAN), 0.3), np.exp(gaps / 0.3) / np.exp(gaps / 0.3).sum())
    close(mixing.reward_gap(doubles(NAN, NAN), 0.3), [0.5, 0.5])


def test_upper_bounds_grow_where_little_was_seen() -> None:
    count = np.array([10, 2, 0])
    for c in (1.0, 0.5):
        expected = np.array([0.5, 0.1, 0]) + c * np.sqrt(2 * np.log(13) / (count + 1))
        close(mixing.upper_confidence_bound(doubles(0.5, 0.1, NAN), torch.tensor(count), c), expected)
    close(mixing.upper_confidence_bound(doubles(0.5), torch.tensor([3])), [0.5 + math.sqrt(2 * math.log(4) / 4)])
    close(mixing.upper_confidence_bound(doubles(0.5), torch.tensor([0])), [0.5 + math.sqrt(2 * math.log(2))])


def test_deficits_are_to_the_target() -> None:
    for target in (1.0, 0.5):
        deficit = target - np.array([0.2, 0.9, 0.2])
        sizes = np.exp(deficit / 0.5) + 0.1
        close(mixing.dads(doubles(0.2, 0.9, NAN), 0.5, 0.1, target), sizes / sizes.sum())
    # The exponentials themselves are no numbers, or nothing.
    close(mixing.dads(doubles(0.7, 0.5), 1e-4, 0.1), [0, 1])
    close(mixing.dads(doubles(-500, -499), 0.5, 0.1), [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))])
    close(mixing.dads(doubles(3, 4), 0.5, 0.1), (np.exp([-4, -6]) + 0.1) / (np.exp([-4, -6]) + 0.1).sum())


def test_estimates_of_a_bandit() -> None:
    got = mixing.importance_estimate(doubles(0.3, NAN, 1), torch.tensor([1, 0, 3]), doubles(0.2, 0.3, 0.5))
    close(got, [0.25 * 0.3 / 0.2, 0, 0.75 * 1 / 0.5])
    weights = np.exp([0, 1.0, -2])
    close(mixing.exp3(doubles(0, 1, -2), 0.3), 0.7 * weights / weights.sum() + 0.1)
    sizes = np.exp(0.4 * np.array([1.0, 2, 0]))
    close(mixing.odm(doubles(1, 2, 0), 0.1, 0.4), 0.1 + 0.7 * sizes / sizes.sum())
    for num, turn in ((2, 0), (2, 1), (3, 7), (5, 100)):
        expected = min(1 / num, math.sqrt(math.log(num) / (num * max(turn, 1))))
        assert mixing.odm_exploration(num, turn) == pytest.approx(expected)


def test_multiplicative_steps_are_smoothed() -> None:
    sizes = np.array([0.2, 0.3, 0.5]) * np.exp(2 * np.array([0.5, 0, 0.1]))
    close(mixing.doremi(doubles(0.2, 0.3, 0.5), doubles(0.5, -9, 0.1), 2.0, 0.3), 0.7 * sizes / sizes.sum() + 0.1)


def test_ranks_and_staleness() -> None:
    scores, staleness = doubles(0.5, 0.9, 0.5, NAN, 0.1), torch.tensor([1, 0, 0, 3, 0])
    ranks = np.array([3.5, 1.5, 3.5, 1.5, 5])
    by_rank = ranks**-2 / (ranks**-2).sum()
    close(mixing.rank_prioritised(scores, staleness, 0.5, 0.2), 0.8 * by_rank + 0.2 * staleness.numpy() / 4)
    close(mixing.rank_prioritised(scores, staleness * 0, 0.5, 0.2), by_rank)
    one = mixing.rank_prioritised(doubles(1, 0), torch.tensor([0, 1]), 1.0, 0.5)
    close(one, [1 / 3, 1 / 6 + 0.5])


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_from_easy_to_hard(progress: float) -> None:
    place = np.arange(4)
    for exponent, sigma, floor in ((0.5, 0.5, 0.0), (2.0, 1.5, 0.1)):
        bell = np.exp(-((place - progress**exponent * 3) ** 2) / (2 * sigma**2))
        got = mixing.e2h_gaussian(progress, 4, exponent=exponent, sigma=sigma, floor=floor)
        close(got, floor + (1 - 4 * floor) * bell / bell.sum())
    easy = (1 + math.cos(math.pi * progress)) / 2
    line = easy * (3 - place) + (1 - easy) * place
    close(mixing.e2h_cosine(progress, 4), line / line.sum())


def test_targets_of_difficulty() -> None:
    assert mixing.adarft_target(3, 0.2, eta=5, alpha=1.5, beta=0.6) == pytest.approx(3 + 5 * math.tanh(-0.6))
    levels = doubles(10, 40, 10, 60)
    for target, expected in (
        (5, [0.5, 0, 0.5, 0]),
        (10, [0.5, 0, 0.5, 0]),
        (25, [0.25, 0.5, 0.25, 0]),
        (40, [0, 1, 0, 0]),
        (55, [0, 0.25, 0, 0.75]),
        (99, [0, 0, 0, 1]),
    ):
        close(mixing.around(target, levels), expected)


def test_slopes() -> None:
    steps, values = [0, 3, 4, 9], [1.0, -2.0, 0.5, 7.0]
    assert mixing.slope(torch.tensor(steps), doubles(*values)) == pytest.approx(np.polyfit(steps, values, 1)[0])


def test_rules_that_no_mixer_uses() -> None:
    prior, effects = np.array([0.2, 0.8]), np.array([[0.5, 0.1], [0.2, -0.3]])
    sizes = prior * np.exp(2.0 * effects.sum(0))
    close(other_mixing.aioli(doubles(*prior), torch.tensor(effects), 2.0), sizes / sizes.sum())

    history, exponent, loss = np.array([0.6, 0.4]), np.array([0.3, 0.01]), np.array([2.0, 3.0])
    low, count, average = np.array([1.5, 1.0]), np.array([10, 40]), np.array([0.3, 0.7])
    given = [torch.tensor(each) for each in (prior, history, exponent, loss, low, count, average)]
    for settings in ({}, {"smoothing": 0.25, "least_exponent": 0.2}):
        smoothing, least = settings.get("smoothing", 0.9), settings.get("least_exponent", 0.05)
        slope = np.maximum(exponent, least) * (loss - low) / count
        instant = prior * np.sqrt(history) * slope / (prior * np.sqrt(history) * slope).sum()
        used, now = other_mixing.ado(*given, **settings)
        close(now, instant)
        close(used, smoothing * average + (1 - smoothing) * instant)

    steps = [{"a": [0.2, 0.4], "b": [1.0]}, {"a": [0.6]}, {"b": [0.9, 0.3], "c": [5.0]}]
    means = {"a": (0.2 / 3 + 0.4 / 3 + 0.6 / 2) / 3, "b": (1 / 3 + 0.9 + 0.3) / 3, "c": 5.0}
    sizes = np.exp(np.maximum(1 - np.array(list(means.values())), 0) / 0.3)
    got = other_mixing.harmonic_deficit(steps, 0.3)
    assert list(got) == ["a", "b", "c"]
    close(list(got.values()), sizes / sizes.sum())

    close(other_mixing.tscl_online(doubles(0.5, 0.2), doubles(1, NAN), 0.1), [0.55, 0.18])
    close(other_mixing.epsilon_greedy(doubles(1, 3, 3, 2), 0.2), [0.05, 0.85, 0.05, 0.05])
