"""Published weights, losses and advantages where a rule changes: ends, ties, defaults, what is missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import advantages, loss, policy, shaping, weighting

NAN, INF = float("nan"), float("inf")


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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


# -- advantages --------------------------------------------------------------------------------------------------------


def test_what_is_added_to_a_deviation_is_a_millionth_unless_said() -> None:
    rewards, ids = doubles(0, 4e-6, 8e-6), torch.zeros(3).long()
    for eps in (None, 1e-3):
        setting = {} if eps is None else {"eps": eps}
        expected = np.array([-4e-6, 0, 4e-6]) / (4e-6 + (eps or 1e-6))
        np.testing.assert_allclose(advantages.grpo_advantages(rewards, ids, **setting), expected)
        np.testing.assert_allclose(advantages.reinforce_advantages(rewards, **setting), expected)


def test_deviations_are_of_a_sample_unless_said() -> None:
    rewards, ids = doubles(0, 1), torch.zeros(2).long()
    np.testing.assert_allclose(advantages.grpo_advantages(rewards, ids), np.array([-0.5, 0.5]) / 0.5**0.5, rtol=1e-5)
    np.testing.assert_allclose(advantages.grpo_advantages(rewards, ids, correction=0), [-1, 1], rtol=1e-5)
    np.testing.assert_allclose(advantages.grpo_advantages(rewards, ids, scale=False), [-0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [-(0.5**0.5), 0.5**0.5]),
        ("grpo_vectorized", [-(0.5**0.5), 0.5**0.5]),
        ("dr_grpo", [-0.5, 0.5]),
        ("rloo", [-1, 1]),
        ("rloo_vectorized", [-1, 1]),
    ],
)
def test_estimators_go_by_their_names(name: str, expected: list[float]) -> None:
    got = advantages.group_advantages(doubles(0, 1), torch.tensor([7, 7]), name)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["gae", None, "reinforce"])
def test_other_estimators_are_refused(name: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^adv_estimator is {name!r}\. Advantages of a group .* for grpo, dr_grpo and rloo"
    ):
        advantages.group_advantages(doubles(0, 1), torch.tensor([7, 7]), name)


def test_a_batch_with_a_baseline_has_a_signal_where_a_group_has_one() -> None:
    # Without a baseline the groups differ; with it nothing is left.
    rewards, ids = doubles(0, 0, 1, 1), torch.tensor([1, 1, 2, 2])
    assert advantages.reinforce_advantages(rewards, ids).tolist() == [0] * 4
    assert advantages.reinforce_advantages(rewards).abs().min() > 0.8
    one = advantages.reinforce_advantages(doubles(0, 1, 1, 1), ids)
    np.testing.assert_allclose(one, np.array([-0.5, 0.5, 0, 0]) / np.std([-0.5, 0.5, 0, 0], ddof=1), rtol=1e-5)
    valid = advantages.reinforce_advantages(doubles(0, 1, 9, 9), valid=torch.tensor([1, 1, 0, 0]))
    np.testing.assert_allclose(valid, np.array([-1, 1, 0, 0]) * 0.5**0.5, rtol=1e-5)


def test_gae_discounts_nothing_unless_said() -> None:
    rewards, values, mask = doubles(1, 2, 4)[None], doubles(0.5, 0.25, 1)[None], torch.ones(1, 3)
    advantage, returns = advantages.gae(rewards, values, mask)
    assert (advantage.tolist(), returns.tolist()) == ([[6.5, 5.75, 3]], [[7, 6, 4]])


# -- the loss ----------------------------------------------------------------------------------------------------------


def parts(log_probs: list[float], old: list[float], advantage: list[float], **settings: Any) -> dict[str, Any]:
    ones = torch.ones(1, len(old))
    out = loss.policy_loss(doubles(*log_probs)[None], doubles(*old)[None], doubles(*advantage)[None], ones, **settings)
    return {name: value.item() for name, value in out.parts.items()} | {"loss": out.loss.item()}


@pytest.mark.parametrize(
    ("settings", "low", "high"), [({}, 0.2, 0.2), ({"clip_low": 0.1}, 0.1, 0.1), ({"clip_high": 0.5}, 0.2, 0.5)]
)
def test_a_ratio_is_clipped_on_both_sides(settings: dict[str, float], low: float, high: float) -> None:
    for ratio in (0.5, 1 - low - 0.01, 1 - low + 0.01, 1, 1 + high - 0.01, 1 + high + 0.01, 3.0):
        for advantage in (1.0, -2.0):
            got = parts([math.log(ratio)], [0.0], [advantage], **settings)
            bounded = min(max(ratio, 1 - low), 1 + high)
            assert got["loss"] == pytest.approx(-min(advantage * ratio, advantage * bounded))
            assert got["clipped"] == (advantage * bounded < advantage * ratio)
            assert list(got) == ["policy", "clipped", "loss"]


def test_a_ratio_ends_at_the_exponential_of_20() -> None:
    for difference, expected in (
        (19.0, math.exp(19)),
        (20.0, math.exp(20)),
        (21.0, math.exp(20)),
        (-30.0, math.exp(-20)),
    ):
        got = parts([difference], [0.0], [-1.0], clip_low=1.0, clip_high=1e12)
        assert got["loss"] == pytest.approx(expected)
    assert loss.MAX_LOG_RATIO == 20


def test_a_sum_over_what_it_is_to_be_divided_by() -> None:
    assert parts([0, 0], [0, 0], [1, 3])["loss"] == -2
    assert parts([0, 0], [0, 0], [1, 3], denominator=8)["loss"] == -0.5
    assert parts([0, 0], [0, 0], [1, 3], aggregation="seq-mean-token-sum")["loss"] == -4


def test_divergence_and_entropy_are_parts_only_where_they_count() -> None:
    ref, entropies = doubles(-1, -2)[None], doubles(1, 2)[None]
    assert list(parts([0, 0], [0, 0], [1, 1], ref_log_probs=ref, entropies=entropies)) == ["policy", "clipped", "loss"]
    got = parts([0, 0], [0, 0], [1, 1], ref_log_probs=ref, kl_coef=0.5, kl_estimator="k1")
    assert got == {"policy": -1, "clipped": 0, "kl": 1.5, "loss": -0.25}
    assert parts([0, 0], [0, 0], [1, 1], ref_log_probs=ref, kl_coef=1.0)["kl"] == pytest.approx(
        (math.exp(-1) + math.exp(-2) + 1) / 2
    )
    got = parts([0, 0], [0, 0], [1, 1], entropies=entropies, entropy_coef=0.5)
    assert got == {"policy": -1, "clipped": 0, "entropy": 1.5, "loss": -1.75}


def test_estimates_of_the_divergence() -> None:
    r = doubles(0.5, -0.5, 0)
    assert loss.token_kl(r, "k1").tolist() == r.tolist()
    assert loss.token_kl(r, "k2").tolist() == [0.125, 0.125, 0]
    np.testing.assert_allclose(loss.token_kl(r), np.exp(-r.numpy()) - 1 + r.numpy(), atol=1e-15)
    far = doubles(-19.0, -21.0, 30.0)
    np.testing.assert_allclose(loss.token_kl(far), [math.exp(19) - 20, math.exp(20) - 21, math.exp(-30) + 29])


def test_denominators_and_scales() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    counts = {"token-mean": 3, "seq-mean-token-mean": 2, "seq-mean-token-sum": 2}
    for aggregation, count in counts.items():
        assert loss.loss_denominator(mask, aggregation) == count  # type: ignore[arg-type]
        assert loss.loss_denominator(mask * 0, aggregation) == 1  # type: ignore[arg-type]
    assert loss.token_scale(mask, "seq-mean-token-mean").flatten().tolist() == [0.5, 1, 1]
    assert loss.token_scale(mask, "token-mean").tolist() == [[1], [1], [1]]


# -- ratios and weights ------------------------------------------------------------------------------------------------


def test_ratios_of_responses() -> None:
    table, mask = doubles(math.log(2), math.log(8), NAN)[None], torch.tensor([[1, 1, 0]])
    np.testing.assert_allclose(policy.importance_ratio(table, mask), [[2, 8, 0]])
    np.testing.assert_allclose(policy.importance_ratio(table, mask, "sequence"), [16])
    np.testing.assert_allclose(policy.importance_ratio(table, mask, "geometric"), [4])
    for level in ("token", "sequence"):
        ends = policy.importance_ratio(doubles(-30.0)[None], torch.ones(1, 1), level)  # type: ignore[arg-type]
        assert ends.item() == pytest.approx(math.exp(-20))


def test_a_quantile_beside_infinity_is_the_nearer_value() -> None:
    values = doubles(0, 1, INF)
    assert [weighting.quantile(values, q).item() for q in (0.5, 0.74, 0.75, 1.0)] == [1, 1, INF, INF]
    assert [weighting.quantile(doubles(-INF, 1), q).item() for q in (0.0, 0.49, 0.5)] == [-INF, -INF, 1]
    assert weighting.quantile(doubles(3), 0.7).item() == 3
    assert weighting.quantile(doubles(0, 1), 0.25).item() == 0.25


def test_what_is_too_small_for_its_precision_is_nothing() -> None:
    tiny = torch.finfo(torch.float32).tiny
    assert weighting.rescaled(torch.tensor([4 * tiny, tiny]), torch.tensor(0.5)).tolist() == [2 * tiny, 0]
    assert weighting.rescaled(torch.tensor([tiny]), torch.tensor(1.0)).tolist() == [tiny]
    assert weighting.finite_weights(torch.tensor([INF, 1.0])).tolist() == [torch.finfo(torch.float32).max, 1]
    assert weighting.unit_scale(torch.zeros(2), torch.ones(2)).item() == 0
