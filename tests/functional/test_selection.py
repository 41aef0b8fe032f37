"""Selections against brute force."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_dataflex.functional.groups import group_index
from lightning_dataflex.functional.selection import in_band, share, top_fraction
from lightning_dataflex.functional.subsets import group_top_k, max_variance

NAN, INF = float("nan"), float("inf")
SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.3, 0.3, 1.0, 2.0, INF, -INF, NAN]), min_size=1, max_size=14)
GROUPED = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([-1.0, 0.0, 0.4, 1.0, 5.0, NAN])), min_size=1, max_size=14
)


def half_up(count: int, fraction: str) -> int:
    exact = count * Fraction(fraction)
    return min(max(int(exact + Fraction(1, 2)), 1), count)


@pytest.mark.parametrize("n", range(2, 17))
def test_a_band_at_attainable_rates_is_open_or_closed_as_asked(n):
    rates = torch.arange(n + 1, dtype=torch.float32) / n
    low, high = 1 / n, (n - 1) / n
    assert in_band(rates, low, high).nonzero().flatten().tolist() == list(range(2, n - 1))
    assert in_band(rates, low, high, closed=True).nonzero().flatten().tolist() == list(range(1, n))


def test_a_band_takes_scores_of_any_shape_and_never_nan():
    scores = torch.tensor([[0.5, NAN], [INF, -INF]])
    assert in_band(scores, 0, 1).tolist() == [[True, False], [False, False]]
    assert not in_band(scores, -INF, INF)[0, 1]


@pytest.mark.parametrize("fraction", ["0.05", "0.1", "0.25", "0.3", "0.5", "0.55", "0.7", "0.9", "1.0"])
def test_share_rounds_halves_up(fraction):
    counts = range(1, 301)
    got = share(torch.tensor(counts), float(fraction))
    assert got.tolist() == [half_up(count, fraction) for count in counts]


def test_share_of_nothing_is_nothing_and_of_many_is_exact():
    many = 2**24 + 1
    assert share(torch.tensor([0, many]), 1.0).tolist() == [0, many]
    assert share(torch.tensor(many), 0.5).item() == (many + 1) // 2


@given(SCORES, st.sampled_from(["0.1", "0.5", "0.75", "1"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_top_fraction_is_the_head_of_a_stable_sort(scores, fraction, largest):
    order = [i for i, s in enumerate(scores) if s == s]
    order.sort(key=lambda i: -scores[i] if largest else scores[i])
    expected = sorted(order[: half_up(len(scores), fraction)])
    keep = top_fraction(torch.tensor(scores), float(fraction), largest=largest)
    assert keep.nonzero().flatten().tolist() == expected


def test_the_fraction_is_of_the_valid_samples():
    scores, valid = torch.tensor([0.9, 0.1, 0.2, 0.8]), torch.tensor([False, True, True, False])
    assert top_fraction(scores, 0.5, valid=valid).tolist() == [False, False, True, False]


@given(GROUPED, st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_group_top_k_is_the_head_of_a_stable_sort_of_each_group(rows, k):
    ids, metric = (np.array(column) for column in zip(*rows))
    expected = []
    for i in np.unique(ids):
        members = [j for j in np.flatnonzero(ids == i) if not np.isnan(metric[j])]
        expected += sorted(members, key=lambda j: -metric[j])[:k]
    keep = group_top_k(torch.tensor(metric), group_index(torch.tensor(ids))[0], k)
    assert keep.nonzero().flatten().tolist() == sorted(expected)


@given(GROUPED, st.sampled_from(["0.25", "0.5", "0.75", "1"]))
@settings(max_examples=100, deadline=None)
def test_max_variance_attains_the_best_of_all_subsets(rows, fraction):
    ids, rewards = (np.array(column) for column in zip(*rows))
    keep = max_variance(torch.tensor(rewards), group_index(torch.tensor(ids))[0], float(fraction)).numpy()
    assert not keep[np.isnan(rewards)].any()
    for i in np.unique(ids):
        members = rewards[(ids == i) & ~np.isnan(rewards)]
        if not len(members):
            continue
        size = half_up(len(members), fraction)
        best = max(np.var(subset) for subset in itertools.combinations(members, size))
        chosen = rewards[(ids == i) & keep]
        assert len(chosen) == size
        assert np.var(chosen) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(
    ("group", "kept"),
    [([0, 0, 1, 1, 1, 2], [1, 2, 3]), ([1, 1, 3, 3, 3, 5], [1, 2, 3]), ([0, 2, 2, 3, 3, 3], [0, 1, 4])],
)
def test_max_variance_passes_over_groups_of_which_nothing_may_be_kept(group, kept):
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 1.0, 7.0])
    valid = torch.tensor([True, True, True, True, True, False])
    keep = max_variance(rewards, torch.tensor(group), 0.5, valid=valid)
    assert keep.nonzero().flatten().tolist() == kept


def test_max_variance_of_one_kept_keeps_the_lowest_whatever_other_groups_there_are():
    rewards = torch.tensor(np.random.default_rng(0).uniform(size=(40, 3)))

    keep = max_variance(rewards.flatten(), torch.arange(40).repeat_interleave(3), 1 / 3).view(40, 3)

    assert torch.equal(keep, rewards == rewards.amin(1, keepdim=True))


@given(GROUPED, st.sampled_from(["0.25", "0.5", "0.75"]))
@example([(0, 1.0), (0, 1.0), (0, 0.0)], "0.5")
@settings(max_examples=40, deadline=None)
def test_max_variance_keeps_the_earlier_of_equal_rewards(rows, fraction):
    ids, rewards = (np.array(column) for column in zip(*rows))
    keep = max_variance(torch.tensor(rewards), group_index(torch.tensor(ids))[0], float(fraction))
    for i, j in itertools.combinations(range(len(ids)), 2):
        if ids[i] == ids[j] and rewards[i] == rewards[j]:
            assert keep[i] or not keep[j]


@pytest.mark.parametrize("size", [1e6, 3e9])
def test_max_variance_sees_small_differences_between_large_rewards(size):
    rewards = size + torch.tensor([0, 1, 2, 8], dtype=torch.float64)
    keep = max_variance(rewards, torch.zeros(4).long(), 0.5)
    assert keep.tolist() == [True, False, False, True]


def test_the_samples_that_may_be_kept_can_be_limited():
    values, group = torch.tensor([5.0, 1.0, 3.0, 0.0]), torch.zeros(4).long()
    valid = torch.tensor([False, True, True, True])
    assert group_top_k(values, group, 1, valid=valid).tolist() == [False, False, True, False]
    assert max_variance(values, group, 2 / 3, valid=valid).tolist() == [False, False, True, True]


def test_nothing_to_select_from_selects_nothing():
    none, group = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert top_fraction(none, 0.5).tolist() == []
    assert group_top_k(none, group, 2).tolist() == []
    assert max_variance(none, group, 0.5).tolist() == []
    assert in_band(none, 0, 1).tolist() == []


def test_a_huge_reward_in_one_group_leaves_the_others_alone():
    group, second = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), [0.0, 0.5, 1.0, 0.4]
    alone = max_variance(torch.tensor(second), torch.zeros(4).long(), 0.5)
    for huge in (1.0, 1e9, 1e30, float("inf")):
        kept = max_variance(torch.tensor([huge, 0.0, 0.2, 0.4, *second]), group, 0.5)
        assert torch.equal(kept[4:], alone)
