"""Advantages and losses: names, defaults, and where a rule changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import advantages, loss
from tests.exact import doubles

NAN, INF = float("nan"), float("inf")


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
    with pytest.raises(ValueError, match=rf"^adv_estimator is {name!r}\. Advantages .* for grpo, dr_grpo and rloo"):
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
