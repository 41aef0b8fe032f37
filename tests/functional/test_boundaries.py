"""Published weights where a rule changes: ends, ties, defaults, what is missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import policy, shaping, weighting
from tests.exact import doubles

NAN, INF = float("nan"), float("inf")


# -- shaping -----------------------------------------------------------------------------------------------------------


def shares_of(rewards: list[float], mode: str) -> list[float]:
    """The expectation of a draw from one group, of which the first of equals is the best, and the worst."""
    best, worst, size = rewards.index(max(rewards)), rewards.index(min(rewards)), len(rewards)
    found = [0.0] * size
    if mode == "bon" or size == 1 or (mode == "bw" and best == worst):
        found[best] = 1.0
    elif mode == "bw":
        found[best], found[worst] = 0.5, 0.5
    else:
        found = [0.5 if i == best else 0.5 / (size - 1) for i in range(size)]
    return found


@pytest.mark.parametrize("mode", ["bon", "br", "bw"])
@pytest.mark.parametrize(
    "groups", [[[1.0, 0.0, 1.0, 0.5]], [[2.0], [1.0, 3.0]], [[0.0, 0.0], [1.0, 0.0, 0.0]], [[-1.0, -2.0]]]
)
def test_pf_ppo_draws_from_each_group(groups: list[list[float]], mode: Any) -> None:
    rewards = [reward for group in groups for reward in group]
    # Group numbers need not follow each other, and what has no reward is in none.
    index = [3 * i for i, group in enumerate(groups) for _ in group]
    got = shaping.best_of(doubles(NAN, *rewards), torch.tensor([1, *index]), mode)
    assert got.tolist() == [0, *(share for group in groups for share in shares_of(group, mode))]
    assert shaping.best_of(doubles(NAN, NAN), torch.tensor([0, 0]), mode).tolist() == [0, 0]


def test_awr_is_the_exponential_of_normalised_advantages() -> None:
    x = np.array([-1.0, 0.5, 3.0, 0.0])
    for temperature, clip in ((1.0, 20.0), (0.5, 3.0), (2.0, 20.0)):
        expected = np.minimum(np.exp((x - x.mean()) / (x.std() + 1e-5) / temperature), clip)
        got = shaping.exp_advantage(doubles(*x, NAN), temperature, clip)
        np.testing.assert_allclose(got, [*expected, 0], rtol=1e-12)
    np.testing.assert_allclose(shaping.exp_advantage(doubles(0, 2), eps=1.0), np.exp([-0.5, 0.5]))
    assert shaping.exp_advantage(doubles(*[0] * 999, 1)).max() == 20
    assert shaping.exp_advantage(doubles(NAN)).tolist() == [0]
    assert shaping.exp_advantage(doubles(2, 2)).tolist() == [1, 1]
    ends = shaping.exp_advantage(doubles(INF, 5, -INF, -7))
    sign = np.array([1, 0, -1, 0])
    np.testing.assert_allclose(ends, np.exp(sign / (sign.std() + 1e-5)))


def test_rwr_is_the_exponential_over_its_mean() -> None:
    x = np.array([0.0, 1.0, 3.0])
    for beta in (1.0, 0.5):
        expected = np.exp(x / beta) / np.exp(x / beta).mean()
        np.testing.assert_allclose(shaping.exp_reward(doubles(*x, NAN), beta), [*expected, 0])
    np.testing.assert_allclose(shaping.exp_reward(doubles(*x)), np.exp(x) / np.exp(x).mean())


def test_grpo_lead_is_a_logistic_that_falls_with_what_was_expected() -> None:
    def falling(rate: float, low: float, high: float, centre: float, slope: float) -> float:
        return low + (high - low) / (1 + math.exp(slope * (rate - centre)))

    rates, signs = [0.0, 0.25, 0.75, 1.0, 0.5, NAN, 0.5], [1.0, -1.0, 2.0, -2.0, 0.0, 1.0, NAN]
    for given in ({}, {"low": 0.5, "high": 2.0, "centre": 0.25, "slope": 3.0}):
        setting = {"low": 0.4, "high": 1.5, "centre": 0.75, "slope": 10.0} | given
        expected = [falling(r if a > 0 else 1 - r, **setting) for r, a in zip(rates[:5], signs)]
        got = shaping.difficulty_logistic(doubles(*rates), doubles(*signs), **given)
        np.testing.assert_allclose(got, [*expected, 0, 0])


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("easy", [0, 0, 0.5, 1, 1, 1, 1, 1, 1]),
        ("medium", [0, 0, 0.5, 1, 1, 1, 0.5, 0, 0]),
        ("hard", [0.25, 0.25, 1, 1, 1, 1, 0.5, 0, 0]),
    ],
)
def test_a_stage_of_training(stage: Any, expected: list[float]) -> None:
    rates = doubles(0, 9e-7, 1 / 6, 0.5, 0.5 + 9e-7, 0.5 + 2e-6, 5 / 6, 1 - 9e-7, 1)
    if stage == "easy":
        rates[-3:] = doubles(0.6, 0.9, 1)
    np.testing.assert_allclose(shaping.stage_weight(rates, stage), expected, atol=1e-9)
    assert shaping.stage_weight(doubles(NAN), stage).tolist() == [0]


def test_a_stage_ends_a_little_beyond_the_middle() -> None:
    """On either side of 1/2 + 1e-6, far from the middle of a curve that is flat there: by its difference from 1."""
    near, beyond = doubles(0.5 + 1e-3).item(), shaping.stage_weight(doubles(0.501), "hard").item()
    assert beyond == pytest.approx(math.sin(math.pi * near)) != 1
    assert shaping.stage_weight(doubles(0.499), "hard").item() == 1
    assert shaping.stage_weight(doubles(0.501), "easy").item() == 1
    assert shaping.stage_weight(doubles(0.499), "easy").item() == pytest.approx(math.sin(math.pi * 0.499)) != 1
    assert shaping.stage_weight(doubles(0), "hard", all_failed=0.5).item() == 0.5
    # What is 1e-6 from an end is at it.
    at_ends = doubles(1e-6, 1 - 1e-6)
    assert shaping.stage_weight(at_ends, "hard").tolist() == [0.25, 0]
    assert shaping.stage_weight(at_ends, "medium").tolist() == [0, 0]
    assert shaping.stage_weight(doubles(2e-6), "hard").item() == 1
    assert shaping.stage_weight(doubles(2e-6), "medium").item() == pytest.approx(2e-6 * math.pi)
    assert shaping.stage_weight(doubles(1 - 2e-6), "medium").item() == pytest.approx(2e-6 * math.pi)


def test_entropy_shares_of_sides_that_differ() -> None:
    # Of group 0 two solved and two failed, of group 1 one solved; the last failed one has no entropy.
    entropies = torch.tensor([[3.0], [1.0], [2.0], [0.0], [5.0]])
    solved, group = torch.tensor([True, True, False, False, True]), torch.tensor([0, 0, 0, 0, 1])
    got = shaping.entropy_share(entropies, torch.ones(5, 1).bool(), group, solved, 0.5).flatten()
    inverse = np.array([1 / (2 + 1e-8), 1 / 1e-8])
    failed = 1 + 0.5 * 2 * inverse / inverse.sum()
    np.testing.assert_allclose(got, [1 + 0.75, 1 + 0.25, *failed, 1.5], rtol=1e-6)
    assert got.dtype == torch.float32
    none = torch.ones(0, 2)
    assert shaping.entropy_share(none, none.bool(), torch.ones(0).long(), none[:, 0].bool(), 0.1).shape == (0, 2)
    odd = shaping.entropy_share(
        torch.tensor([[-1.0], [1.0], [INF]]), torch.ones(3, 1).bool(), torch.arange(3), torch.ones(3).bool(), 1.0
    )
    assert odd.flatten().tolist() == [2, 2, 2]


def test_powers_of_lengths_and_rates_and_caps_of_ratios() -> None:
    lengths = torch.tensor([0, 1, 4])
    assert [shaping.length_power(lengths, power).tolist() for power in (1, -0.5, 0)] == [
        [0, 1, 4],
        [0, 1, 0.5],
        [0, 1, 1],
    ]
    assert shaping.length_power(lengths, 1).dtype == torch.float32
    np.testing.assert_allclose(shaping.focal(doubles(0, 0.25, 1, 1.5, NAN)), [1, 0.75**2, 0, 0, 0])
    np.testing.assert_allclose(shaping.focal(doubles(0, 0.25), 3.0), [1, 0.75**3])
    assert shaping.truncated(doubles(0, 1.9, 2.1, INF, NAN)).tolist() == [0, 1.9, 2, 2, 0]
    assert shaping.truncated(doubles(1.9), 1.5).tolist() == [1.5]
    ratio = doubles(0.5 - 2e-6, 0.5 - 9e-7, 0.5, 2, 2 + 9e-7, 2 + 2e-6, NAN)
    assert (shaping.masked_ratio(ratio, 0.5, 2.0) > 0).tolist() == [False, True, True, True, True, False, False]
    assert shaping.masked_ratio(ratio, 0.5, 2.0)[4] == 2 + 9e-7


# -- ratios and weights ------------------------------------------------------------------------------------------------


def test_ratios_of_responses() -> None:
    table, mask = doubles(math.log(2), math.log(8), NAN)[None], torch.tensor([[1, 1, 0]])
    np.testing.assert_allclose(policy.importance_ratio(table, mask), [[2, 8, 0]])
    np.testing.assert_allclose(policy.importance_ratio(table, mask, "sequence"), [16])
    np.testing.assert_allclose(policy.importance_ratio(table, mask, "geometric"), [4])
    for level in ("token", "sequence"):
        ends = policy.importance_ratio(doubles(-30.0)[None], torch.ones(1, 1), level)  # type: ignore[arg-type]
        assert ends.item() == pytest.approx(math.exp(-20))


def test_a_quantile_leaves_its_values_in_order_unless_told_otherwise() -> None:
    values = doubles(5, 1, 3, 2)
    assert weighting.quantile(values, 0.5).item() == 2.5
    assert values.tolist() == [5, 1, 3, 2]
    assert weighting.quantile(values, 0.5, overwrite_input=True).item() == 2.5
    assert sorted(values.tolist()) == [1, 2, 3, 5]


def test_a_quantile_beside_infinity_is_the_nearer_value() -> None:
    values = doubles(0, 1, INF)
    assert [weighting.quantile(values, q).item() for q in (0.5, 0.74, 0.75, 1.0)] == [1, 1, INF, INF]
    assert [weighting.quantile(doubles(-INF, 1), q).item() for q in (0.0, 0.49, 0.5)] == [-INF, -INF, 1]
    assert weighting.quantile(doubles(3), 0.7).item() == 3
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        assert weighting.quantile(torch.tensor([5, 1, 3]).to(dtype), 0.5).item() == 3
    assert weighting.quantile(doubles(5, 1, 3).requires_grad_(), 0.5).item() == 3
    assert weighting.quantile(doubles(0, 1), 0.25).item() == 0.25


def test_what_is_too_small_for_its_precision_is_nothing() -> None:
    tiny = torch.finfo(torch.float32).tiny
    assert weighting.rescaled(torch.tensor([4 * tiny, tiny]), torch.tensor(0.5)).tolist() == [2 * tiny, 0]
    assert weighting.rescaled(torch.tensor([tiny]), torch.tensor(1.0)).tolist() == [tiny]
    assert weighting.finite_weights(torch.tensor([INF, 1.0])).tolist() == [torch.finfo(torch.float32).max, 1]
    assert weighting.unit_scale(torch.zeros(2), torch.ones(2)).item() == 0


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.7, 0.9, 1 - 1e-12, 1.0])
def test_a_quantile_without_counting_is_the_quantile(q: float) -> None:
    rng = torch.Generator().manual_seed(0)
    for size in (1, 2, 3, 4, 10, 11, 1001):
        values = torch.randn(size, 3, generator=rng).round(decimals=1)
        values[0, 0] = INF
        mask = torch.rand(size, 3, generator=rng) < 0.7
        mask[0, :2] = True
        expected = weighting.quantile(values[mask], q)
        torch.testing.assert_close(weighting.quantile_inside(values, mask, q), expected, rtol=0, atol=0)
    assert weighting.quantile_inside(values, torch.zeros_like(mask), q).isinf()


def test_the_place_of_a_quantile_is_whole_where_only_rounding_says_otherwise() -> None:
    values = torch.arange(101.0, dtype=torch.float64)
    assert 0.07 * 100 > 7
    assert weighting.quantile(values, 0.07).item() == 7
    assert weighting.quantile_inside(values, torch.ones(101, dtype=torch.bool), 0.07).item() == 7
