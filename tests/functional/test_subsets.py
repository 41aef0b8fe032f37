"""Groups that stay, and draws, against loops, sets and frequencies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_dataflex.functional import combining, drawing, scoring, selection, subsets
from lightning_dataflex.functional.groups import group_index

NAN = float("nan")
ROWS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.25, 0.5, 2.0, NAN])), min_size=1, max_size=20)


def columns(rows) -> tuple[np.ndarray, np.ndarray, torch.Tensor, int]:
    ids, scores = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    return ids, scores, *group_index(torch.tensor(ids))


def ranked(ids: np.ndarray, scores: np.ndarray) -> list[tuple[int, float]]:
    """Group ids and mean scores, best first, of equal ones the group that comes first."""
    found = []
    for i in dict.fromkeys(ids.tolist()):
        members = scores[(ids == i) & ~np.isnan(scores)]
        if len(members):
            found.append((i, members.mean()))
    return sorted(found, key=lambda pair: -pair[1])


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_mixed_groups_have_two_different_scores(rows):
    ids, scores, group, num = columns(rows)
    mixed = {i for i in set(ids.tolist()) if len({s for s in scores[ids == i] if s == s}) > 1}
    expected = [i in mixed and s == s for i, s in zip(ids.tolist(), scores)]
    assert subsets.mixed_groups(torch.tensor(scores), group, num).tolist() == expected


def test_an_infinite_score_makes_no_group_mixed_and_is_in_none():
    scores = torch.tensor([torch.inf, 0.0, torch.inf, -torch.inf, torch.inf, 0.0, 1.0])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    assert subsets.mixed_groups(scores, group, 3).tolist() == [False] * 5 + [True] * 2


@given(ROWS, st.sampled_from([0.25, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_top_groups_are_the_head_of_a_stable_sort(rows, fraction):
    ids, scores, group, num = columns(rows)
    order = ranked(ids, scores)
    chosen = {i for i, _ in order[: max(1, int(len(order) * fraction + 0.5))]}
    expected = [i in chosen and s == s for i, s in zip(ids.tolist(), scores)]
    assert subsets.top_groups(torch.tensor(scores), group, num, fraction).tolist() == expected


@example([(0, 0.5), (1, 0.5)], 0.5, "linear")
@given(ROWS, st.sampled_from([0.3, 0.5, 0.9, 1.0]), st.sampled_from(["linear", "softmax"]))
@settings(max_examples=80, deadline=None)
def test_nucleus_groups_are_the_fewest_best_with_that_share(rows, p, shares):
    ids, scores, group, num = columns(rows)
    order = ranked(ids, scores)
    if shares == "linear":
        order = [pair for pair in order if pair[1] > 0]
    sizes = np.array([s for _, s in order])
    sizes = np.exp(sizes) if shares == "softmax" else sizes
    chosen: set[int] = set()
    for k in range(1, len(order) + 1):
        chosen.add(order[k - 1][0])
        if sizes[:k].sum() >= (p - 1e-9) * sizes.sum():
            break
    expected = [i in chosen and s == s for i, s in zip(ids.tolist(), scores)]
    assert subsets.nucleus_groups(torch.tensor(scores), group, num, p, shares).tolist() == expected


def test_a_nucleus_of_scores_without_a_sum():
    group = torch.arange(3)
    assert subsets.nucleus_groups(torch.tensor([1.0, torch.inf, 2.0]), group, 3, 0.9).tolist() == [False, True, False]
    assert not subsets.nucleus_groups(torch.tensor([0.0, 1e-7, 2e-7]), group, 3, 0.9).any()
    even = subsets.nucleus_groups(torch.tensor([0.0, 1e-7, 2e-7]), group, 3, 0.9, "softmax")
    assert even.tolist() == [True, True, True]


def test_pruning_leaves_one_of_each_group():
    scores, group = torch.tensor([1.0, 2.0, 0.5, NAN, NAN]), torch.tensor([0, 0, 1, 1, 2])
    assert subsets.pruned(scores, group, 1.0).tolist() == [False, True, True, False, False]
    assert subsets.pruned(torch.tensor([]), torch.tensor([], dtype=torch.int64), 0.5).tolist() == []


def test_top_tokens_of_all_valid_tokens_are_numpys_quantile():
    rng = np.random.default_rng(0)
    scores, mask = rng.uniform(size=(7, 9)), rng.uniform(size=(7, 9)) < 0.6
    expected = mask & (scores >= np.quantile(scores[mask], 0.8))
    dirty = torch.tensor(np.where(mask, scores, np.inf))
    assert np.array_equal(selection.top_tokens(dirty, torch.tensor(mask), 0.2), expected)
    assert not selection.top_tokens(dirty, torch.zeros(7, 9), 0.2).any()


def test_draws_without_replacement_have_the_frequencies_of_successive_draws():
    chances, turns, num = np.array([0.1, 0.2, 0.3, 0.4]), 4000, 2
    expected = dict.fromkeys(itertools.combinations(range(4), num), 0.0)
    for a, b in itertools.permutations(range(4), num):
        expected[tuple(sorted((a, b)))] += chances[a] * chances[b] / (1 - chances[a])
    seen = dict.fromkeys(expected, 0)
    log_chances, ids = torch.tensor(chances).log(), torch.tensor([7, -3, 100, 2**40])
    for step in range(turns):
        kept = drawing.drawn(log_chances, num, ids, 1, step)
        seen[tuple(kept.nonzero().flatten().tolist())] += 1
    # Five standard deviations of a frequency.
    for pair, share in expected.items():
        assert seen[pair] / turns == pytest.approx(share, abs=5 * (share * (1 - share) / turns) ** 0.5)


def test_a_draw_follows_from_ids_and_key_and_not_from_the_order():
    ids, log_chances = torch.arange(50), torch.rand(50, generator=torch.Generator().manual_seed(0)).log()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    kept = drawing.drawn(log_chances, 20, ids, 3, 4)
    assert torch.equal(drawing.drawn(log_chances[order], 20, ids[order], 3, 4), kept[order])
    assert kept.sum() == 20
    assert not torch.equal(drawing.drawn(log_chances, 20, ids, 3, 5), kept)
    assert drawing.drawn(torch.tensor([NAN, 0.0]), 2, torch.arange(2), 0).tolist() == [False, True]


@given(st.lists(st.sampled_from([0.0, 0.5, 0.5, 1.0, NAN]), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_percentile_rank_counts_what_is_below_and_half_of_what_is_equal(scores):
    got = combining.percentile_rank(torch.tensor(scores, dtype=torch.float64)).tolist()
    known = [s for s in scores if s == s]
    for value, rank in zip(scores, got):
        others = len(known) - 1
        if value != value:
            assert rank != rank
        elif not others:
            assert rank == 0.5
        else:
            below = sum(s < value for s in known) + (sum(s == value for s in known) - 1) / 2
            assert rank == pytest.approx(below / others)


def test_standardised_scores_have_mean_0_and_deviation_1_also_of_huge_ones():
    for scale in (1e-3, 1.0, 1e30):
        got = combining.standardised(torch.tensor([1.0, 2.0, 4.0, NAN], dtype=torch.float64) * scale)
        assert float(got[:3].mean()) == pytest.approx(0, abs=1e-9)
        assert float(got[:3].std(correction=0)) == pytest.approx(1, abs=2e-3)
    assert combining.standardised(torch.tensor([5.0, 5.0])).tolist() == [0, 0]
    assert combining.standardised(torch.tensor([torch.inf, 1.0, 3.0])).isfinite().all()


def test_alignment_with_gaps_and_at_its_limits():
    curves = torch.tensor([[NAN, 0.5, NAN], [1.0, 1.0, 1.0], [NAN, NAN, NAN]], dtype=torch.float64)
    baseline = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    # The gaps of the first are filled by the epoch after, and after the last by that before.
    first = 1 - ((0.5 - baseline) ** 2).sum() / ((1 - baseline) ** 2).sum()
    got = scoring.trajectory_alignment(curves, baseline)
    assert got[:2].tolist() == pytest.approx([float(first), 0.0])
    assert got[2].isnan()
    late = scoring.trajectory_alignment(torch.tensor([[0.1, 0.5, NAN], [0.1, 0.5, 0.5]]), baseline)
    assert late[0] == late[1] != scoring.trajectory_alignment(torch.tensor([[0.1, 0.5, 0.1]]), baseline)[0]
    # An epoch in which nothing was seen says nothing.
    unseen = scoring.trajectory_alignment(torch.tensor([[0.2, NAN, 0.8], [1.0, NAN, 1.0]], dtype=torch.float64))
    assert unseen.tolist() == pytest.approx([0.0, 0.0])
    with pytest.raises(ValueError, match=r"rates has shape \(3,\)"):
        scoring.trajectory_alignment(torch.ones(3))
    solved = scoring.trajectory_alignment(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.ones(2))
    assert solved.tolist() == [1.0, -torch.inf]


def test_spread_is_zero_where_rewards_are_equal_and_numpys_elsewhere():
    rewards = np.array([0.1, 0.1, 0.1, 1.0, 0.0, 0.5, NAN])
    group = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for power, correction in itertools.product((1, 2), (0, 1)):
        got = scoring.reward_spread(torch.tensor(rewards), group, 2, power=power, correction=correction)
        expected = np.std([1.0, 0.0, 0.5], ddof=correction) ** power
        np.testing.assert_allclose(got, [0, 0, 0, *[expected] * 3, NAN], atol=1e-12)
        assert got[:3].tolist() == [0, 0, 0]
