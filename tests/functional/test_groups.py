"""Group statistics against loops in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex.functional.groups import (
    group_differs,
    group_index,
    group_mean,
    group_mean_and_std,
    group_order,
    group_rank,
    group_size,
    group_spread,
    group_std,
    group_sum,
)

ROW = st.tuples(st.integers(-5, 5), st.sampled_from([-1.5, 0.0, 0.1, 0.5, 1.0, 7.0]), st.booleans())
ROWS = st.lists(ROW, min_size=1, max_size=24)


def columns(rows: list[tuple[int, float, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, values, valid = zip(*rows)
    return np.array(ids), np.array(values), np.array(valid)


def by_group(ids: np.ndarray, values: np.ndarray, valid: np.ndarray) -> list[np.ndarray]:
    return [values[(ids == i) & valid] for i in np.unique(ids)]


@given(ROWS)
@settings(max_examples=40, deadline=None)
def test_index_is_dense_and_equal_for_equal_ids(rows):
    ids, _, _ = columns(rows)
    group, num_groups = group_index(torch.tensor(ids))
    assert num_groups == len(set(ids))
    assert sorted(set(group.tolist())) == list(range(num_groups))
    assert ((group[:, None] == group[None]).numpy() == (ids[:, None] == ids[None])).all()


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_statistics_are_those_of_a_loop_over_groups(rows):
    ids, values, valid = columns(rows)
    members = by_group(ids, values, valid)
    group, n = group_index(torch.tensor(ids))
    # What an invalid sample holds must not matter.
    x, ok = torch.tensor(np.where(valid, values, np.nan)), torch.tensor(valid)
    np.testing.assert_allclose(group_sum(x, group, n, ok), [m.sum() for m in members], atol=1e-12)
    np.testing.assert_array_equal(group_size(group, n, ok), [len(m) for m in members])
    np.testing.assert_allclose(
        group_mean(x, group, n, ok), [m.mean() if len(m) else np.nan for m in members], atol=1e-12
    )
    np.testing.assert_allclose(group_spread(x, group, n, ok), [np.ptp(m) if len(m) else 0 for m in members])
    for ddof in (0, 1):
        expected = [m.std(ddof=ddof) if len(m) > ddof else 0 for m in members]
        np.testing.assert_allclose(group_std(x, group, n, ok, correction=ddof), expected, atol=1e-12)


@given(ROWS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_rank_counts_the_members_that_come_first(rows, descending):
    ids, values, _ = columns(rows)
    rank = group_rank(torch.tensor(values), group_index(torch.tensor(ids))[0], descending=descending)
    for i, (own_id, own) in enumerate(zip(ids, values)):
        before = [
            j for j in range(len(ids)) if ids[j] == own_id and (values[j] > own if descending else values[j] < own)
        ]
        tied = [j for j in range(i) if ids[j] == own_id and values[j] == own]
        assert rank[i] == len(before) + len(tied)


def test_no_samples_give_no_groups():
    group, num_groups = group_index(torch.empty(0, dtype=torch.int64))
    assert num_groups == 0
    assert group_rank(torch.empty(0), group).tolist() == []
    assert group_sum(torch.empty(0), group, 0, torch.empty(0, dtype=torch.bool)).tolist() == []


def test_three_rewards_of_a_tenth_have_no_spread_though_their_deviation_is_not_zero():
    rewards, group, valid = torch.tensor([0.1] * 3, dtype=torch.float64), torch.zeros(3).long(), torch.ones(3).bool()
    assert np.std([0.1, 0.1, 0.1]) > 0
    assert group_spread(rewards, group, 1, valid).item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_statistics_are_float64_whatever_the_values_are(dtype):
    values, group, valid = torch.tensor([1, 0, 1], dtype=dtype), torch.tensor([0, 0, 0]), torch.ones(3).bool()
    mean = group_mean(values, group, 1, valid)
    assert mean.dtype == torch.float64
    assert mean.item() == 2 / 3


def test_a_sum_does_not_depend_on_the_order_of_a_million_samples():
    values = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    group, valid = torch.zeros(len(values), dtype=torch.int64), torch.ones(len(values)).bool()
    forward = group_sum(values, group, 1, valid)
    backward = group_sum(values.flip(0), group, 1, valid)
    assert abs(forward - backward).item() < 1e-7


def test_an_infinite_value_differs_from_a_finite_one():
    values = torch.tensor([torch.inf, 0.0, torch.inf, torch.inf])
    differs = group_differs(values, torch.tensor([0, 0, 1, 1]), 2, torch.tensor([True] * 4))
    assert differs[0]


SIZES = st.sampled_from([[3], [1] * 5, [4] * 4, [2, 3, 2], [9, 1, 1, 1, 1, 1, 1, 1, 1], [0, 3, 0, 2]])


@settings(deadline=None)
@given(SIZES, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_samples_in_the_order_of_their_groups_and_values(sizes, draw, descending, shuffled):
    group = [i for i, size in enumerate(sizes) for _ in range(size)]
    if shuffled:
        draw.shuffle(group)
    values = [draw.choice([-np.inf, -1.0, 0.0, 0.5, 2.0, np.inf, np.nan]) for _ in group]

    def place(i: int) -> tuple:
        value = -values[i] if descending else values[i]
        return group[i], np.isnan(value), 0 if np.isnan(value) else value, i

    expected = sorted(range(len(group)), key=place)

    order = group_order(torch.tensor(values), torch.tensor(group), descending=descending)
    rank = group_rank(torch.tensor(values), torch.tensor(group), descending=descending)

    assert order.tolist() == expected
    assert rank[order].tolist() == [i for size in sizes for i in range(size)]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.float64]),
)
def test_the_index_of_groups_is_that_of_a_sort(ids, dtype):
    distinct, expected = np.unique(ids, return_inverse=True)
    group, num_groups = group_index(torch.tensor(ids, dtype=dtype))
    assert (group.tolist(), group.dtype, num_groups) == (expected.tolist(), torch.int64, len(distinct))


@given(ROWS, st.sampled_from([0, 1]))
def test_mean_and_deviation_together_are_those_of_each(rows, correction):
    ids, values, valid = map(torch.from_numpy, columns(rows))
    group, num_groups = group_index(ids)
    mean, std = group_mean_and_std(values, group, num_groups, valid, correction=correction)
    torch.testing.assert_close(mean, group_mean(values, group, num_groups, valid), equal_nan=True)
    for i in range(num_groups):
        inside = values[(group == i) & valid].double().numpy()
        assert std[i] == pytest.approx(inside.std(ddof=correction) if len(inside) > correction else 0)
