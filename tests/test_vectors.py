"""Small inputs and right outputs of the published rules, each with where it comes from.

`paper`: the paper's text. `code`: the authors' code. `note`: third-party notes on the paper. `first`: first principles
or brute force. Agreement with `code` proves the transcription, not that the code is the paper.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, build
from lightning_dataflex.functional.weighting import mean_one


def flattened(groups: dict[str, list[float]]) -> dict:
    uid = [name for name, rewards in groups.items() for _ in rewards]
    rewards = torch.tensor([float(r) for rewards in groups.values() for r in rewards])
    return {"uid": uid, "rm_scores": rewards, "response_mask": torch.ones(len(uid), 1)}


def kept_groups(groups: dict[str, list[float]], **band) -> set[str]:
    batch = flattened(groups)
    pipeline = Pipeline(build("scorer", "group_solve_rate"), build("selector", "threshold_band", **band))
    keep = pipeline.decide(batch).keep.tolist()
    kept = {name for name, k in zip(batch["uid"], keep) if k}
    assert keep == [name in kept for name in batch["uid"]]
    return kept


def test_dapo_mixed__paper():
    groups = {"a": [1, 0, 1, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 0], "d": [0, 0, 0, 1]}
    assert kept_groups(groups) == {"a", "d"}


def test_dapo_plus_minus_one__paper():
    assert kept_groups({"a": [-1, -1], "b": [-1, 1]}) == {"b"}


# Provenance: third-party notes. The paper's own inequality was not seen; the closed band is that of a published recipe.
def test_online_difficulty_filter_closed_band__note():
    groups = {f"k{k}": [1] * k + [0] * (5 - k) for k in range(6)}
    assert kept_groups(groups, low=0.2, high=0.8, closed=True) == {"k1", "k2", "k3", "k4"}
    assert kept_groups(groups, low=0.2, high=0.8) == {"k2", "k3"}


GFPO = {
    "shortest": (
        [1, 1, 1, 0, 0, 0, 0, 0],
        [100, 40, 80, 10, 20, 30, 200, 300],
        4,
        [1, 3, 4, 5],
        [0, 1.7320508075688774, 0, -0.5773502691896258, -0.5773502691896258, -0.5773502691896258, 0, 0],
    ),
    "degenerate_subset": ([1, 1, 0, 0], [5, 6, 50, 60], 2, [0, 1], [0, 0, 0, 0]),
}


@pytest.mark.parametrize(("rewards", "lengths", "k", "kept", "advantages"), list(GFPO.values()), ids=list(GFPO))
def test_gfpo__paper(rewards, lengths, k, kept, advantages):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    batch = {"rm_scores": torch.tensor(rewards).float(), "response_mask": mask, "uid": ["q"] * len(rewards)}
    decision = Pipeline(build("scorer", "reward_difficulty"), build("selector", "gfpo", k=k)).decide(batch)
    assert decision.keep.nonzero().flatten().tolist() == kept
    # The population deviation of the kept rewards; an epsilon of 1e-6 beside it.
    np.testing.assert_allclose(decision.advantages, advantages, atol=1e-5)


PODS = {
    "real": ([0.1, 0.9, 0.5, 0.45, 0.3, 0.8], 4, 0.11187500000000002, [0.1, 0.3, 0.8, 0.9]),
    "skewed": ([0, 0, 0, 1, 1.1, 1.2, 5], 3, 5.5555555555555545, [0, 0, 5]),
    "few_pos": ([1, 0, 0, 0, 0, 0, 0, 0], 4, 0.1875, [0, 0, 0, 1]),
}


@pytest.mark.parametrize(("rewards", "n", "variance", "multiset"), list(PODS.values()), ids=list(PODS))
def test_pods__first(rewards, n, variance, multiset):
    batch = flattened({"q": rewards})
    selector = build("selector", "max_variance", keep_fraction=n / len(rewards))
    decision = Pipeline(build("scorer", "reward_difficulty"), selector).decide(batch)
    chosen = np.array(rewards, dtype=np.float64)[decision.keep.numpy()]
    assert np.var(chosen) == pytest.approx(variance, abs=1e-12)
    assert sorted(chosen) == multiset
    # As the paper says: normalised within the subset, sample deviation plus 1e-4.
    expected = (chosen - chosen.mean()) / (chosen.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(decision.advantages[decision.keep], expected, atol=1e-5)
    assert not decision.advantages[~decision.keep].any()


def test_topk_advantage__first():
    batch = {"advantages": torch.tensor([-2, 0.5, 1, -0.1, 1]), "response_mask": torch.ones(5, 1)}
    pipeline = Pipeline(build("scorer", "advantage_magnitude"), build("selector", "topk_fraction", fraction=3 / 5))
    assert pipeline.decide(batch).keep.nonzero().flatten().tolist() == [0, 2, 4]


# As the authors' code, which does not renormalise; scaled to a mean of 1 on demand, as the ancestor does.
@pytest.mark.parametrize(("alpha", "expected"), [(0.3, [0.73, 0.97, 1.0]), (0.0, [1.0, 1.0, 1.0])])
def test_advantage_reweighting__code(alpha, expected):
    log_probs = torch.tensor([[-2.3025850929940455, -0.10536051565782628, 0.0]])
    batch = {"old_log_probs": log_probs, "response_mask": torch.ones(1, 3)}
    plain = build("reweighter", "advantage_reweight", alpha=alpha)
    scaled = build("reweighter", "advantage_reweight", alpha=alpha, normalize="tokens")
    weights = [Pipeline(build("scorer", "token_prob"), rule).decide(batch).weights for rule in (plain, scaled)]
    np.testing.assert_allclose(weights[0], [expected], atol=1e-6)
    np.testing.assert_allclose(weights[1], [np.array(expected) / np.mean(expected)], atol=1e-6)


def test_mean_one_tokens__first():
    mask = torch.tensor([[1] * 9, [1] + [0] * 8])
    expected = np.array([[5 / 6] * 9, [2.5] + [0] * 8])
    per_sample = mean_one(torch.tensor([0.5, 1.5]), mask.sum(-1))
    np.testing.assert_allclose(per_sample[:, None] * mask, expected, atol=1e-6)
    np.testing.assert_allclose(mean_one(torch.tensor([[0.5], [1.5]]).expand(2, 9), mask), expected, atol=1e-6)
    # The same through a reweighter: |advantage| to the power of 1.
    batch = {"advantages": torch.tensor([-0.5, 1.5]), "response_mask": mask}
    pipeline = Pipeline(build("scorer", "advantage_magnitude"), build("reweighter", "per_advantage", alpha=1.0))
    np.testing.assert_allclose(pipeline.decide(batch).weights, expected, atol=1e-6)
    assert math.isclose(expected.sum() / mask.sum(), 1)
