"""Advantage estimators against loops in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex.functional.advantages import gae, grpo_advantages, reinforce_advantages, rloo_advantages

NAN = float("nan")
REWARD = st.sampled_from([-1.0, 0.0, 0.1, 0.7, 1.0, 3.0, NAN])
ROWS = st.lists(st.tuples(st.integers(0, 3), REWARD, st.booleans()), min_size=1, max_size=20)


def columns(rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, rewards, valid = (np.array(column) for column in zip(*rows))
    return ids, rewards, valid & ~np.isnan(rewards)


def per_group(ids: np.ndarray, rewards: np.ndarray, counted: np.ndarray, rule) -> np.ndarray:
    out = np.zeros(len(ids))
    for i in np.unique(ids):
        members = (ids == i) & counted
        if members.sum() > 1 and np.ptp(rewards[members]) > 1e-6:
            out[members] = rule(rewards[members])
    return out


@given(ROWS, st.booleans(), st.sampled_from([0, 1]))
@settings(max_examples=80, deadline=None)
def test_grpo_is_the_standardised_reward_of_each_group(rows, scale, ddof):
    ids, rewards, counted = columns(rows)

    def rule(r):
        return (r - r.mean()) / (r.std(ddof=ddof) + 1e-6 if scale else 1)

    valid = torch.tensor([row[2] for row in rows])
    got = grpo_advantages(torch.tensor(rewards), torch.tensor(ids), valid=valid, scale=scale, correction=ddof)
    np.testing.assert_allclose(got, per_group(ids, rewards, counted, rule), atol=1e-9)


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_rloo_subtracts_the_mean_of_the_others(rows):
    ids, rewards, counted = columns(rows)

    def rule(r):
        return [r[i] - np.delete(r, i).mean() for i in range(len(r))]

    valid = torch.tensor([row[2] for row in rows])
    got = rloo_advantages(torch.tensor(rewards), torch.tensor(ids), valid=valid)
    np.testing.assert_allclose(got, per_group(ids, rewards, counted, rule), atol=1e-9)


@given(ROWS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_reinforce_standardises_over_the_batch(rows, baseline):
    ids, rewards, counted = columns(rows)
    values = rewards.copy()
    if baseline:
        for i in np.unique(ids):
            members = (ids == i) & counted
            values[members] -= rewards[members].mean() if members.any() else 0
    expected = np.zeros(len(ids))
    if counted.sum() > 1 and np.ptp(values[counted]) > 1e-6:
        expected[counted] = (values[counted] - values[counted].mean()) / (values[counted].std(ddof=1) + 1e-6)
    valid = torch.tensor([row[2] for row in rows])
    got = reinforce_advantages(torch.tensor(rewards), torch.tensor(ids) if baseline else None, valid=valid)
    np.testing.assert_allclose(got, expected, atol=1e-9)


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages, reinforce_advantages])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.5, 0.5 + 5e-7, 0.5], [0.0, 1e-6], [5.0], [NAN, 1.0, NAN], [NAN], []])
def test_nothing_to_compare_gives_exactly_zero(estimator, rewards):
    got = estimator(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64))
    assert got.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages, reinforce_advantages])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_advantages_of_other_types_are_float32(estimator, dtype):
    rewards, ids = torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 0, 0])
    got = estimator(rewards.to(dtype), ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), estimator(rewards.double(), ids))


def generalised(rewards, values, valid, gamma, lam):
    """The sum of discounted errors of the valid tokens, term by term, as the paper writes it."""
    out = np.zeros(rewards.shape)
    for n, row in enumerate(valid):
        at = np.flatnonzero(row)
        r, v = rewards[n, at], np.append(values[n, at], 0)
        delta = r + gamma * v[1:] - v[:-1]
        for t in range(len(at)):
            out[n, at[t]] = sum((gamma * lam) ** k * delta[t + k] for k in range(len(at) - t))
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
def test_gae_is_the_discounted_sum_of_errors(gamma, lam, padding):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 4, 7))
    length = np.array([7, 4, 1, 0])[:, None]
    at = np.arange(7)
    valid = {"left": at >= 7 - length, "right": at < length, "holes": (at * 3) % 7 < length}[padding]
    dirt = np.where(valid, 0, np.nan)
    advantages, returns = gae(
        torch.tensor(rewards + dirt), torch.tensor(values + dirt), torch.tensor(valid), gamma=gamma, lam=lam
    )
    expected = generalised(rewards, values, valid, gamma, lam)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(valid, expected + values, 0), atol=1e-12)


def test_gae_of_one_token_is_its_reward_beyond_its_value():
    advantages, returns = gae(torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.ones(1, 1))
    assert (advantages.tolist(), returns.tolist()) == ([[1.5]], [[2.0]])


def test_gae_of_a_right_value_model_is_zero():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    advantages, returns = gae(rewards, torch.ones(1, 3), torch.ones(1, 3), lam=0.7)
    assert advantages.abs().max() == 0
    assert returns.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gae_of_half_precision_is_that_of_its_numbers_in_double(dtype):
    rewards, values = torch.randn((2, 2, 300), generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = torch.ones(2, 300, dtype=torch.int8)
    got, expected = (
        gae(r, v, mask, gamma=1.0, lam=0.99) for r, v in ((rewards, values), (rewards.double(), values.double()))
    )
    for here, there in zip(got, expected):
        assert here.dtype == torch.float32
        torch.testing.assert_close(here.double(), there, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["rewards", "values"])
def test_gae_refuses_a_number_per_sample(name):
    # Of as many samples as tokens, where it would pass for a number per token.
    tables = {"rewards": torch.ones(3, 3), "values": torch.ones(3, 3)} | {name: torch.ones(3)}
    with pytest.raises(ValueError, match=rf"^{name} has shape \(3,\)\. .* \(3, 3\)\.$"):
        gae(**tables, response_mask=torch.ones(3, 3))
