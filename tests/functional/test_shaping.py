"""Weights and ratios of published rules, beside their vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import blocks, policy, shaping


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


@pytest.mark.parametrize(("stage", "expected"), [("easy", [0, 1, 1]), ("medium", [0, 1, 0]), ("hard", [0.25, 1, 0])])
def test_odsw_at_the_ends_and_in_the_middle_is_exact(stage, expected):
    assert shaping.stage_weight(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), stage).tolist() == expected


def test_odsw_of_an_unknown_rate_is_zero():
    assert shaping.stage_weight(torch.tensor([torch.nan]), "hard").tolist() == [0]


def test_a_masked_ratio_is_kept_at_the_ends_of_its_band():
    ratio = torch.tensor([0.8, 2.0, 0.79, 2.01, torch.nan])
    assert shaping.masked_ratio(ratio, 0.8, 2.0).tolist() == [*ratio[:2].tolist(), 0, 0, 0]


def test_entropies_of_zero_share_equally():
    ones = torch.ones(3, 1, dtype=torch.bool)
    got = shaping.entropy_share(torch.zeros(3, 1), ones, torch.zeros(3).long(), torch.ones(3).bool(), 0.1)
    assert got.flatten().tolist() == pytest.approx([1.1] * 3)


def test_awr_is_clipped():
    assert shaping.exp_advantage(torch.tensor([0.0] * 99 + [1.0]), temperature=0.1).max() == 20


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


def test_an_empty_response_has_a_ratio_of_one():
    assert policy.importance_ratio(torch.full((1, 3), torch.nan), torch.zeros(1, 3), "geometric").tolist() == [1]


def test_what_is_impossible_to_both_policies_is_as_likely():
    never = torch.full((1, 2), -torch.inf)
    assert policy.importance_ratio(policy.log_ratio(never, never), torch.ones(1, 2)).tolist() == [[1, 1]]


@pytest.mark.parametrize("block", [2**18, 8, 1])
def test_entropy_shares_against_loops(monkeypatch, block):
    monkeypatch.setattr(blocks, "BLOCK", block)
    rng = np.random.default_rng(0)
    n, length = 12, 4
    entropies, mask = rng.uniform(0, 2, (n, length)), rng.uniform(size=(n, length)) < 0.7
    group, solved = rng.integers(0, 3, n), rng.uniform(size=n) < 0.5
    expected = np.zeros((n, length))
    for i, t in zip(*np.nonzero(mask)):
        same = [j for j in range(n) if group[j] == group[i] and solved[j] == solved[i] and mask[j, t]]
        size = {j: entropies[j, t] if solved[i] else 1 / entropies[j, t] for j in same}
        expected[i, t] = 1 + 0.3 * size[i] / sum(size.values()) * len(same)
    dirty = torch.tensor(np.where(mask, entropies, np.nan))
    got = shaping.entropy_share(dirty, torch.tensor(mask), torch.tensor(group), torch.tensor(solved), 0.3)
    np.testing.assert_allclose(got, expected, atol=1e-6)
