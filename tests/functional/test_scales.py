"""Scores on a common scale, bands, nuclei and curves, at their ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import combining, scoring, selection, subsets
from tests.exact import close, doubles

NAN, INF = float("nan"), float("inf")


# -- scales and choices ------------------------------------------------------------------------------------------------


def test_scores_on_a_common_scale() -> None:
    np.testing.assert_array_equal(combining.percentile_rank(doubles(1, 1, 5, NAN, 3)), [1 / 6, 1 / 6, 1, NAN, 2 / 3])
    np.testing.assert_array_equal(combining.percentile_rank(doubles(NAN, 4)), [NAN, 0.5])
    np.testing.assert_array_equal(combining.percentile_rank(doubles(NAN)), [NAN])
    x = np.array([1.0, 2, 6])
    np.testing.assert_allclose(combining.standardised(doubles(*x, NAN)), [*(x - x.mean()) / x.std(), NAN])
    np.testing.assert_array_equal(combining.standardised(doubles(NAN)), [NAN])
    np.testing.assert_allclose(combining.standardised(doubles(INF, -INF, 0, 2)), [1, -1, -1, 1])
    np.testing.assert_allclose(combining.standardised(doubles(INF, -INF)), [1, -1])
    assert combining.standardised(doubles(1e9, 1e9 + 1e-4)).tolist() == [0, 0]
    np.testing.assert_allclose(combining.standardised(doubles(1e9, 1e9 + 1)), [-1, 1])
    np.testing.assert_allclose(combining.standardised(doubles(1e300, 3e300)), [-1, 1])
    parts = [doubles(1, INF, NAN), doubles(10, 20, 30)]
    np.testing.assert_array_equal(combining.weighted_sum(parts, [0, 2]), [20, 40, NAN])
    np.testing.assert_array_equal(combining.weighted_sum(parts, [-1, 0.5]), [4, -INF, NAN])
    np.testing.assert_array_equal(combining.product(parts), [10, INF, NAN])


def test_bands_and_thresholds_have_a_tolerance() -> None:
    scores = doubles(0.2 - 2e-6, 0.2 - 9e-7, 0.2 + 9e-7, 0.2 + 2e-6, 0.8 - 2e-6, 0.8 - 9e-7, 0.8 + 9e-7, 0.8 + 2e-6)
    open_, closed = selection.in_band(scores, 0.2, 0.8), selection.in_band(scores, 0.2, 0.8, closed=True)
    assert open_.tolist() == [False, False, False, True, True, False, False, False]
    assert closed.tolist() == [False, True, True, True, True, True, True, False]
    # What is 1e-6 from a threshold is on it.
    assert selection.in_band(doubles(0.2 + 1e-6, 0.8 - 1e-6), 0.2, 0.8).tolist() == [False, False]
    assert selection.at_least(scores[:4], 0.2).tolist() == [False, True, True, True]
    assert selection.at_least(scores[:4], 0.2, strict=True).tolist() == [False, False, False, True]
    assert selection.nearest_to(doubles(0.4, 0.6, NAN, 0.5, 0.1), 0.5, 2).tolist() == [True, False, False, True, False]
    assert selection.nearest_to(doubles(0.6, 0.4, 0.1), 0.5, 1).tolist() == [True, False, False]
    assert selection.nearest_to(doubles(0.6, NAN), 0.5, 9).tolist() == [True, False]
    assert selection.share(torch.tensor([0, 1, 3, 10]), 0.25).tolist() == [0, 1, 1, 3]
    assert selection.share(torch.tensor([3]), 1 / 3 - 1e-9).tolist() == [1]
    assert selection.share(torch.tensor([3]), 0.5 - 1e-7).tolist() == [2]
    assert selection.top_fraction(doubles(1, 3, 2, 3), 0.25).tolist() == [False, True, False, False]
    assert selection.top_fraction(doubles(1, 3, 2, 1), 0.25, largest=False).tolist() == [True, False, False, False]
    tokens = selection.top_tokens(doubles(1, 2, 3, 4, 9).view(1, 5), torch.tensor([[1, 1, 1, 1, 0]]), 0.5)
    assert tokens.tolist() == [[False, False, True, True, False]]


def test_difficulty_says_how_many_stay() -> None:
    seen, k = doubles(0, 0.25, 0.5, 0.75, 1), [8, 6, 4, 2]
    means = doubles(0, 0.25 - 2e-6, 0.25 - 1e-6, 0.25, 0.5 - 9e-7, 0.6, 0.75, 1)
    assert subsets.k_of_difficulty(means, seen, k).tolist() == [8, 8, 6, 6, 4, 4, 2, 2]
    assert subsets.k_of_difficulty(means[:2], seen[:3], k).tolist() == [8, 8]
    assert subsets.k_of_difficulty(means[-1:], seen[:4], k).tolist() == [2]
    assert subsets.k_of_difficulty(means[-1:], seen, k, ready_after=6).tolist() == [8]
    assert subsets.k_of_difficulty(means[-1:], seen[:1], k, ready_after=1).tolist() == [2]


def test_of_subsets_that_vary_alike_the_lowest_rewards_stay() -> None:
    one_group = torch.zeros(3).long()
    assert subsets.max_variance(doubles(2, 0, 1), one_group, 1 / 3).tolist() == [False, True, False]
    assert subsets.max_variance(doubles(2, 1, 0), one_group, 2 / 3).tolist() == [True, False, True]
    assert subsets.max_variance(doubles(0, 1, 2, 3), torch.zeros(4).long(), 0.75).tolist() == [True, True, False, True]


def test_pruning_is_of_whole_samples() -> None:
    scores, group = doubles(1, 2, 3, 4, NAN, 7), torch.tensor([0, 0, 0, 0, 0, 1])
    for rate, kept in ((0.0, 4), (0.24, 4), (0.25, 3), (0.5, 2), (0.74, 2), (0.75, 1), (1.0, 1)):
        got = subsets.pruned(scores, group, rate)
        assert got[:5].nonzero().flatten().tolist() == list(range(4 - kept, 4))
        assert got[5]
    assert subsets.pruned(doubles(*range(10)), torch.zeros(10).long(), 0.3 - 1e-9).sum() == 7


def test_groups_of_a_nucleus() -> None:
    scores, group = doubles(0.5, 0.3, 0.2, NAN), torch.tensor([0, 1, 2, 2])
    for p, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 3)):
        got = subsets.nucleus_groups(scores, group, 3, p)
        assert got.tolist() == [True, kept > 1, kept > 2, False]
    assert subsets.nucleus_groups(scores, group, 3, 0.0).tolist() == [True, False, False, False]
    assert subsets.top_groups(scores, group, 3, 0.3).tolist() == [True, False, False, False]
    assert subsets.top_groups(doubles(1, 2, 2, 1), torch.tensor([0, 1, 2, 0]), 3, 0.33).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_scores_of_groups_and_what_is_no_signal() -> None:
    outcomes, group = doubles(1, 0, 0, NAN, 0.5, 0.5 + 9e-7), torch.tensor([0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(scoring.reward_variance(outcomes, group, 2), [8 / 9] * 3 + [NAN, 0, 0])
    np.testing.assert_allclose(scoring.reward_spread(outcomes, group, 2), [(2 / 9) ** 0.5] * 3 + [NAN, 0, 0])
    np.testing.assert_allclose(
        scoring.reward_spread(outcomes, group, 2, power=2, correction=1), [1 / 3] * 3 + [NAN, 0, 0]
    )
    np.testing.assert_allclose(scoring.solve_rate(outcomes, group, 2), [1 / 3] * 3 + [NAN, 0, 0])
    np.testing.assert_allclose(scoring.solve_rate(outcomes, group, 2, success_threshold=0.4), [1 / 3] * 3 + [NAN, 1, 1])
    assert scoring.is_solved(doubles(0.5 + 9e-7, 0.5 + 2e-6, NAN, INF), 0.5).tolist() == [False, True, False, True]


def test_rewards_of_tokens_and_scores_that_are_none() -> None:
    table = doubles(1, 2, 3, 4).view(2, 2)
    assert scoring.outcome(table).tolist() == [3, 7]
    assert scoring.outcome(table[:, 0]).tolist() == [1, 3]
    assert scoring.unscored(doubles(INF, -INF, 1, NAN, 1, 1).view(3, 2)).tolist() == [False, True, False]
    assert scoring.unscored(doubles(INF, NAN)).tolist() == [False, True]
    assert scoring.token_prob(doubles(0)[None]).tolist() == [[1]]


def test_alignment_of_curves() -> None:
    curves = np.array([[0.2, 0.4, 0.9], [0.0, 1.0, 1.0], [1, 1, 1]])
    mean = curves.mean(0)
    expected = 1 - ((curves - mean) ** 2).sum(1) / ((1 - mean) ** 2).sum()
    close(scoring.trajectory_alignment(torch.tensor(curves)), expected)
    # Before the first visit stands the next one, after the last the last one.
    gaps = torch.tensor([[NAN, NAN, 0.4, NAN], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    base = doubles(0.1, 0.2, 0.3, 0.4)
    whole = ((1 - base) ** 2).sum()
    close(scoring.trajectory_alignment(gaps, base), [1 - ((0.4 - base) ** 2).sum() / whole, 1])
    middle = torch.tensor([[0.1, NAN, NAN, 0.6]], dtype=torch.float64)
    filled = doubles(0.1, 0.6, 0.6, 0.6)
    close(scoring.trajectory_alignment(middle, base), [1 - ((filled - base) ** 2).sum() / whole])
    assert scoring.trajectory_alignment(torch.full((2, 3), NAN)).isnan().tolist() == [True, True]
    for rates, baseline in ((torch.ones(3), None), (torch.ones(2, 3), torch.ones(2)), (torch.ones(2, 2, 2), None)):
        with pytest.raises(ValueError, match=r"^rates has shape .*\. They must be \(prompts, epochs\) and \(epochs,\)"):
            scoring.trajectory_alignment(rates, baseline)
