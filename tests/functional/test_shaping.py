"""Weights of published rules against their vectors: `paper`, `code`, `known`, `first` say where each is from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import policy, shaping

LOG_RATIO = torch.tensor([[0.0, 1.0986122886681098, -1.0], [-0.6931471805599453, 0.4054651081081644, 0.0]]).double()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(("mode", "expected"), [("bon", [0, 1, 0, 0, 0]), ("bw", [0, 0.5, 0.5, 0, 0])])
def test_pf_ppo__paper(mode, expected):
    rewards = torch.tensor([0.2, 0.9, -0.5, 0.4, 0.1])
    assert shaping.best_of(rewards, torch.zeros(5).long(), mode).tolist() == expected


def test_pf_ppo_is_of_each_prompt_and_sums_to_one():
    rng = np.random.default_rng(0)
    rewards, group = torch.tensor(rng.integers(0, 3, 40)).float(), torch.tensor(rng.integers(0, 9, 40))
    for mode in ("bon", "br", "bw"):
        weights = shaping.best_of(rewards, group, mode)
        sums = torch.zeros(9).index_add_(0, group, weights)
        assert sums[torch.unique(group)].tolist() == pytest.approx([1] * len(torch.unique(group)))
    # The expectation of the paper's draw: the best, and one of the others.
    five = shaping.best_of(torch.tensor([0.2, 0.9, -0.5, 0.4, 0.1]), torch.zeros(5).long(), "br")
    assert five.tolist() == pytest.approx([0.125, 0.5, 0.125, 0.125, 0.125])
    assert shaping.best_of(torch.tensor([torch.nan, 1.0]), torch.zeros(2).long()).tolist() == [0, 1]


def test_awr_normed__code():
    weights = shaping.exp_advantage(torch.tensor([-1.0, 0, 1, 4]).double())
    expected = [0.3433382200424427, 0.5859506976209199, 1.0, 4.970691076759307]
    assert weights.tolist() == pytest.approx(expected, abs=1e-9)
    assert shaping.exp_advantage(torch.tensor([0.0] * 99 + [1.0]), temperature=0.1).max() == 20


def test_rwr__known():
    expected = [0.19013681499911286, 1.4049315925004435, 1.4049315925004435]
    assert shaping.exp_reward(torch.tensor([0.0, 1, 1]).double(), 0.5).tolist() == pytest.approx(expected, abs=1e-12)


def test_grpo_lead__code():
    rate = torch.tensor([0, 0.25, 0.5, 0.75, 1]).double()
    expected = [1.499391943499384, 1.492637863983287, 1.4165560019766321, 0.9500000000000001, 0.4834439980233679]
    ones = torch.ones(5).double()
    assert shaping.difficulty_logistic(rate, ones).tolist() == pytest.approx(expected, abs=1e-12)
    hard = torch.full((2,), 0.125).double()
    weights = shaping.difficulty_logistic(hard, torch.tensor([2.4748737341, -0.3535533905]).double())
    assert weights.tolist() == pytest.approx([1.4978805918703397, 0.6449701527078398], abs=1e-12)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("easy", [0.0, 0.7071067811865475, 1, 1, 1]), ("hard", [0.25, 1, 1, 0.7071067811865476, 1.2246467991473532e-16])],
)
def test_odsw__code(stage, expected):
    rate = torch.tensor([0, 0.25, 0.5, 0.75, 1]).double()
    assert shaping.stage_weight(rate, stage).tolist() == pytest.approx(expected, abs=1e-12)


def test_focal__first():
    rate = torch.tensor([0, 0.25, 0.5, 0.75, 1]).double()
    assert shaping.focal(rate, 2).tolist() == [1, 0.5625, 0.25, 0.0625, 0]


def test_tis_token__code():
    weights = shaping.truncated(policy.importance_ratio(LOG_RATIO, MASK), 2.0)
    np.testing.assert_allclose(weights, [[1.0, 2.0, 0.36787944117144233], [0.5, 1.5, 0.0]], atol=1e-12)


def test_tis_geometric_and_gspo_ratio__first_and_code():
    ratio = policy.importance_ratio(LOG_RATIO, MASK, "geometric")
    np.testing.assert_allclose(ratio, [1.0334169747868518, 0.8660254037844387], atol=1e-12)
    assert shaping.truncated(ratio).tolist() == ratio.tolist()
    empty = policy.importance_ratio(torch.full((1, 3), torch.nan), torch.zeros(1, 3), "geometric")
    assert empty.tolist() == [1]


def test_mis_sequence__code():
    ratio = policy.importance_ratio(LOG_RATIO, MASK, "sequence")
    np.testing.assert_allclose(shaping.masked_ratio(ratio, 0.8, 2.0), [1.103638323514327, 0.0], atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratios_are_clamped_before_they_overflow(level):
    ratio = policy.importance_ratio(torch.tensor([[1000.0, -1000.0], [500.0, 500.0]]), torch.ones(2, 2), level)
    assert ratio.isfinite().all()
    assert float(ratio.max()) == pytest.approx(math.exp(20))


def test_kl_of_the_same_policy_is_zero_and_estimates_agree_on_average():
    rng = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(4, generator=rng), 0)
    q = torch.softmax(torch.randn(4, generator=rng), 0)
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=rng)
    ones = torch.ones(1, len(drawn))
    exact = float((p * (p / q).log()).sum())
    for estimator, tolerance in (("k1", 0.02), ("k3", 0.02)):
        kl = policy.kl_to(p.log()[drawn][None], q.log()[drawn][None], ones, estimator)
        assert float(kl.mean()) == pytest.approx(exact, rel=tolerance)
        assert not policy.kl_to(p.log()[drawn][None], p.log()[drawn][None], ones, estimator).any()
