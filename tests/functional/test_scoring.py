"""Scores against loops in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex.functional.groups import group_index
from lightning_dataflex.functional.scoring import advantage_magnitude, no_signal, outcome, solve_rate, token_prob

CELL = st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), st.booleans())
TABLE = st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=1, max_size=6))
DIRT = [float("nan"), float("inf"), -float("inf")]


def table_and_mask(cells) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(cells)
    return array[..., 0], array[..., 1].astype(bool)


def dirty(values: np.ndarray, mask: np.ndarray, dirt: float) -> torch.Tensor:
    return torch.tensor(np.where(mask, values, dirt), dtype=torch.float32)


@given(TABLE, st.sampled_from(DIRT))
@settings(max_examples=40, deadline=None)
def test_outcome_is_the_sum_over_valid_tokens(cells, dirt):
    values, mask = table_and_mask(cells)
    expected = [row[ok].sum() if ok.any() else np.nan for row, ok in zip(values, mask)]
    np.testing.assert_allclose(outcome(dirty(values, mask, dirt), torch.tensor(mask)), expected, atol=1e-6)


def test_outcome_of_rewards_per_sample_is_the_reward_except_for_an_empty_response():
    got = outcome(torch.tensor([2.0, 3.0]), torch.tensor([[1, 1], [0, 0]]))
    np.testing.assert_array_equal(got, [2.0, np.nan])


def test_a_valid_nan_reward_makes_a_nan_outcome():
    assert outcome(torch.tensor([[1.0, torch.nan]]), torch.tensor([[1, 1]])).isnan().all()


@given(TABLE, st.sampled_from(DIRT), st.sampled_from(["mean", "sum", "max"]))
@settings(max_examples=60, deadline=None)
def test_advantage_magnitude_reduces_the_valid_tokens(cells, dirt, reduction):
    values, mask = table_and_mask(cells)
    reduce = {"mean": np.mean, "sum": np.sum, "max": np.max}[reduction]
    expected = [reduce(abs(row[ok])) if ok.any() else np.nan for row, ok in zip(values, mask)]
    got = advantage_magnitude(dirty(values, mask, dirt), torch.tensor(mask), reduction=reduction)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(("reduction", "expected"), [("mean", [2, 1]), ("sum", [6, 1]), ("max", [2, 1])])
def test_an_advantage_per_sample_stands_for_each_of_its_tokens(reduction, expected):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert advantage_magnitude(torch.tensor([-2.0, 1.0]), mask, reduction=reduction).tolist() == expected


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2), ("sum", 6), ("max", 3)])
def test_without_a_mask_every_token_counts(reduction, expected):
    assert advantage_magnitude(torch.tensor([[1.0, -3.0, 2.0]]), reduction=reduction).tolist() == [expected]


@pytest.mark.parametrize("reduction", ["mean", "sum", "max"])
def test_responses_of_no_tokens_at_all_have_no_magnitude(reduction):
    got = advantage_magnitude(torch.zeros(2, 0), torch.zeros(2, 0), reduction=reduction)
    np.testing.assert_array_equal(got, [np.nan, np.nan])


def test_an_unknown_reduction_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'median'.*mean, sum, max"):
        advantage_magnitude(torch.ones(1, 1), reduction="median")


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0, np.nan])), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_solve_rate_is_the_share_of_scorable_samples_above_the_threshold(rows):
    ids, rewards = (np.array(column) for column in zip(*rows))
    scored = ~np.isnan(rewards)
    expected = [(rewards[scored & (ids == i)] > 0.5).mean() if ok else np.nan for i, ok in zip(ids, scored)]
    group, n = group_index(torch.tensor(ids))
    np.testing.assert_allclose(solve_rate(torch.tensor(rewards), group, n), expected, atol=1e-12)


def test_an_outcome_on_the_threshold_is_not_solved_not_even_by_rounding():
    rewards = torch.tensor([0.3], dtype=torch.float32)
    assert rewards.double().item() > 0.3
    assert solve_rate(rewards, torch.tensor([0]), 1, success_threshold=0.3).item() == 0


def test_no_signal_is_a_matter_of_spread():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1e-7, 0.0, 1e-5, 3.0, torch.nan, 1.0])
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 4, 4])
    assert no_signal(rewards, group, 6).tolist() == [True, True, False, True, True, True]


def test_token_prob_is_the_exponential_and_zero_outside_the_mask():
    log_probs = torch.tensor([[0.0, -np.log(2), -torch.inf, torch.nan]])
    got = token_prob(log_probs, torch.tensor([[1, 1, 1, 0]]))
    np.testing.assert_allclose(got, [[1, 0.5, 0, 0]], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_float32(dtype):
    half = torch.ones(1, 300, dtype=dtype)
    mask = torch.ones(1, 300)
    assert outcome(half, mask).dtype == torch.float32
    assert outcome(half + 1, mask).item() == 600
    assert advantage_magnitude(half, mask, reduction="sum").item() == 300
    assert token_prob(half * 0).dtype == torch.float32
