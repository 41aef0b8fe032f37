"""Weights against NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex.functional.weighting import (
    mean_one,
    power,
    probability_mix,
    quantile,
    quantile_band,
    row_means,
    softmax,
)

NAN, INF = float("nan"), float("inf")
NUMBERS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20)


@given(st.lists(st.tuples(st.floats(0, 100, width=32), st.integers(0, 9)), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_mean_one_over_tokens(rows):
    weights, tokens = (np.array(column, dtype=np.float64) for column in zip(*rows))
    got = mean_one(torch.tensor(weights), torch.tensor(tokens).long()).numpy()
    total = (weights * tokens).sum()
    if total == 0:
        assert not got.any()
    else:
        np.testing.assert_allclose((got * tokens).sum() / tokens.sum(), 1, rtol=1e-12)
        counted = tokens > 0
        np.testing.assert_allclose(got[counted] * total, weights[counted] * tokens.sum(), rtol=1e-9)


def test_mean_one_of_token_weights_reads_no_padding_and_no_nan():
    weights = torch.tensor([[2.0, NAN, INF], [4.0, 3.0, NAN]])
    got = mean_one(weights, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    # NaN on a valid token counts as 0, so that three valid tokens share a weight of 6.
    np.testing.assert_allclose(got, [[1, 0, 0], [2, 0, 0]])


def test_mean_one_by_a_measure_of_nothing_is_that_over_tokens():
    weights, tokens = torch.tensor([1.0, 3.0]), torch.tensor([2, 2])
    assert mean_one(weights, tokens, torch.zeros(2)).tolist() == [0.5, 1.5]
    assert mean_one(weights, tokens, torch.tensor([0.0, 5.0])).tolist() == pytest.approx([1 / 3, 1])


def test_mean_one_keeps_an_infinite_weight_finite():
    assert mean_one(torch.tensor([INF, 1.0, INF]), torch.tensor([1, 2, 3])).tolist() == [1.5, 0, 1.5]


@given(NUMBERS, st.sampled_from([0.1, 1.0, 7.0]))
@settings(max_examples=60, deadline=None)
def test_softmax_is_the_textbook_formula(scores, temperature):
    x = np.array(scores, dtype=np.float64) / temperature
    expected = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    np.testing.assert_allclose(softmax(torch.tensor(scores, dtype=torch.float64), temperature), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([NAN, NAN], [0, 0]),
        ([INF, 1.0, INF, NAN], [0.5, 0, 0.5, 0]),
        ([-INF, 1.0], [0, 1]),
        ([], []),
    ],
)
def test_softmax_of_what_is_not_finite(scores, expected):
    assert softmax(torch.tensor(scores)).tolist() == expected


@given(NUMBERS, st.floats(0, 1))
@settings(max_examples=80, deadline=None)
def test_quantile_is_numpys(values, q):
    got = quantile(torch.tensor(values, dtype=torch.float64), q).item()
    # A place within 1e-9 of a whole one counts as whole.
    within = 1e-9 * max(1.0, max(values) - min(values))
    assert got == pytest.approx(np.quantile(np.array(values, dtype=np.float64), q), abs=within)


def test_quantile_takes_more_values_than_torch_does():
    values = torch.arange(2**24 + 2, dtype=torch.int32).flip(0)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values.float(), 0.5)
    assert quantile(values.double(), 0.5).item() == (2**24 + 1) / 2


def test_quantile_at_a_whole_place_is_the_value_there():
    place = 0.07 * 100_000
    assert place > 7_000
    assert quantile(torch.arange(100_001).double(), 0.07).item() == 7_000


def test_a_row_without_a_token_has_a_mean_of_zero():
    mean, tokens = row_means(torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([[1, 1], [0, 0]]))
    assert (mean.tolist(), tokens.tolist()) == ([3, 0], [2, 0])


@given(NUMBERS, st.sampled_from([(0.25, 0.75), (0.0, 0.5), (0.5, 0.5), (0.0, 1.0)]))
@settings(max_examples=60, deadline=None)
def test_quantile_band_doubles_what_lies_between_the_quantiles(scores, quantiles):
    x = np.array(scores, dtype=np.float64)
    low, high = np.quantile(x, quantiles)
    got = quantile_band(torch.tensor(x), *quantiles, 2.0).numpy()
    # Rounding may put a score that equals a quantile on either side of it.
    clear = (abs(x - low) > 1e-9) & (abs(x - high) > 1e-9)
    np.testing.assert_array_equal(got[clear], np.where((x >= low) & (x <= high), 2.0, 1.0)[clear])


def test_quantile_band_of_infinite_and_missing_scores():
    assert quantile_band(torch.tensor([INF, 0.0, INF, -INF, NAN]), 0.5, 1.0, 3.0).tolist() == [3, 1, 3, 1, 0]
    assert quantile_band(torch.tensor([NAN, NAN]), 0.25, 0.75, 2.0).tolist() == [0, 0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_probability_mix_is_the_line_from_one_minus_alpha_to_one(probs, alpha):
    got = probability_mix(torch.tensor(probs, dtype=torch.float64), alpha)
    np.testing.assert_allclose(got, [1 - alpha * (1 - p) for p in probs], atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_power_of_a_magnitude(alpha):
    got = power(torch.tensor([4.0, 1.0, 0.25, 0.0, NAN]), alpha)
    np.testing.assert_allclose(got, [4.0**alpha, 1, 0.25**alpha, 0.0**alpha, 0])


def test_power_of_a_negative_score_is_that_of_zero():
    assert power(torch.tensor([-4.0, 4.0]), 0.5).tolist() == [0, 2]


def test_a_token_of_unknown_probability_weighs_nothing():
    assert probability_mix(torch.tensor([[0.5, NAN]]), 0.5).tolist() == [[0.75, 0]]
