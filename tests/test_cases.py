"""Faults reported of software of this kind, each with the identifier under which it was collected.

Those of the loss are beside this file; those that need a Trainer, ranks, a mixer or a sampler are with those parts.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, RolloutBatch, build
from lightning_dataflex.functional.advantages import (
    group_advantages,
    grpo_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from lightning_dataflex.functional.groups import group_index, group_std
from lightning_dataflex.functional.scoring import no_signal
from lightning_dataflex.functional.selection import top_fraction, top_tokens
from lightning_dataflex.functional.weighting import mean_one, quantile

NAN = float("nan")
SPELT = ("", "_vectorized")


def rows(uid, rewards, lengths=None, **more) -> dict:
    lengths = torch.tensor(lengths or [1] * len(uid))
    mask = (torch.arange(max(int(lengths.max()), 1)) < lengths[:, None]).long()
    return {"uid": uid, "rm_scores": torch.tensor(rewards), "response_mask": mask} | more


def decide(batch, scorer="group_solve_rate", actuator="threshold_band", kind="selector", fields=None, **params):
    return Pipeline(build("scorer", scorer), build(kind, actuator, **params), fields=fields).decide(batch)


def kept(decision) -> list[int]:
    return decision.keep.nonzero().flatten().tolist()


def test_R001_a_group_of_equal_totals_is_dropped():
    decision = decide(rows(["a"] * 4, [1.0] * 4))
    assert decision.scores.tolist() == [1] * 4
    assert kept(decision) == []
    assert (decision.metrics["kept_frac"], decision.metrics["frac_zero_std"]) == (0, 1)


def test_R002_a_lone_sample_is_kept_by_a_rule_on_variance():
    batch = rows(["a"], [5.0])
    std = group_std(batch["rm_scores"], torch.tensor([0]), 1, torch.tensor([True]))
    assert kept(decide(batch, "reward_difficulty", "max_variance", keep_fraction=0.5)) == [0]
    assert std.item() == 0


def test_R003_leaving_one_out_of_a_group_of_one_gives_zero():
    rewards, ids = torch.tensor([0.6, 1.0, 0.0]), torch.tensor([0, 1, 1])
    for got in (rloo_advantages(rewards, ids), *(group_advantages(rewards, ids, f"rloo{end}") for end in SPELT)):
        assert got.tolist() == [0, 1, -1]
    assert (
        rloo_advantages(rewards, torch.tensor([0, 0, 0]), valid=torch.tensor([True, False, False])).tolist() == [0] * 3
    )


def test_R005_groups_without_signal_in_a_row_are_no_error():
    pipeline = Pipeline(build("scorer", "group_solve_rate"), build("selector", "threshold_band"))
    batch = rows(["a"] * 4 + ["b"] * 4, [1.0] * 8)
    assert [pipeline.decide(batch, step).num_kept for step in range(3)] == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:1 samples have no score")
def test_R007_a_sample_without_a_reward_does_not_move_its_siblings():
    batch = rows(["a"] * 4, [1.0, 0.0, NAN, 1.0])
    decision = decide(batch)
    advantages = grpo_advantages(batch["rm_scores"], torch.zeros(4).long(), scale=False)
    np.testing.assert_allclose(decision.scores, [2 / 3, 2 / 3, NAN, 2 / 3], atol=1e-6)
    np.testing.assert_allclose(advantages, [1 / 3, -2 / 3, 0, 1 / 3], atol=1e-6)
    assert kept(decision) == [0, 1, 3]
    assert decision.weights.flatten().tolist() == [1, 1, 0, 1]
    assert decision.metrics["n_nan"] == 1


@pytest.mark.filterwarnings("ignore:1 samples have no score")
def test_R010_nan_is_not_the_best_score():
    decision = decide(rows(list("abcd"), [0.1, NAN, 0.9, 0.3]), "reward_difficulty", "topk_fraction", fraction=0.5)
    assert kept(decision) == [2, 3]
    assert decision.metrics["n_nan"] == 1


def test_R011_a_nan_spreads_to_no_other_weight():
    power = build("reweighter", "per_advantage", alpha=0.5).act(torch.tensor([1.0, NAN]), {})
    soft = build("reweighter", "softmax").act(torch.tensor([0.0, NAN, 1.0]), {})
    assert power.tolist() == [1, 0]
    assert soft[1] == 0
    assert soft[[0, 2]].mean().item() == pytest.approx(1)


@pytest.mark.parametrize("num_padding", [0, 3, 30])
def test_R012_padding_rows_change_no_number(num_padding):
    mask = torch.cat([torch.ones(1, 2), torch.zeros(num_padding, 2)])
    batch = {"advantages": torch.full((1 + num_padding, 2), 2.0), "response_mask": mask}
    decision = decide(batch, "advantage_magnitude", "softmax", "reweighter")
    assert decision.scores[0] == 2
    assert decision.weights.tolist() == [[1, 1]] + [[0, 0]] * num_padding
    assert [decision.metrics[k].item() for k in ("kept_frac", "weight_mean", "weight_std", "ess")] == [1, 1, 0, 1]


def test_R013_the_reward_of_an_empty_response_reaches_nobody():
    batch = {
        "uid": ["a", "a"],
        "token_level_scores": torch.tensor([[0.0, 6.0], [0.0, 0.0]]),
        "response_mask": torch.tensor([[0, 0], [1, 1]]),
    }
    decision = decide(batch)
    read = RolloutBatch(batch)
    np.testing.assert_array_equal(decision.scores, [NAN, 0])
    assert decision.weights[0].tolist() == [0, 0]
    assert grpo_advantages(read.outcomes, read.group_ids).tolist() == [0, 0]


def test_R014_padding_is_not_among_the_top_tokens():
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4] + [4.9] * 4)
    valid = torch.tensor([True] * 4 + [False] * 4)
    assert quantile(scores[valid], 0.5).item() == pytest.approx(0.25)
    assert top_fraction(scores, 0.5, valid=valid).nonzero().flatten().tolist() == [2, 3]
    assert top_tokens(scores[None], valid[None], 0.5).nonzero()[:, 1].tolist() == [2, 3]


def test_R015_a_fully_masked_row_is_not_the_shortest():
    batch = rows(["a"] * 3, [1.0, 0.0, 1.0], [3, 5, 0])
    assert kept(decide(batch, "reward_difficulty", "gfpo", k=1, metric="short")) == [0]


def test_R016_groups_of_unequal_size_keep_their_own_baselines():
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    rewards = torch.tensor([9.0, 3, 6, 4, 4, 8, 2, 6, 6])
    assert grpo_advantages(rewards, ids, scale=False).tolist() == [3, -3, 0, 0, 0, 2.5, -3.5, 0.5, 0.5]
    assert grpo_advantages(rewards, ids)[3:5].tolist() == [0, 0]


def test_R017_samples_of_a_group_need_not_stand_together():
    decision = decide(rows(["a", "b", "a", "b"], [1.0, 0.0, 0.0, 0.0]))
    assert decision.scores.tolist() == [0.5, 0, 0.5, 0]
    assert kept(decision) == [0, 2]


def test_R018_groups_of_one_each_are_warned_of_once():
    scorer, batch = build("scorer", "group_solve_rate"), rows(list("abcd"), [1.0, 0.0, 1.0, 0.0])
    with pytest.warns(UserWarning, match="each of the 4 samples is alone in its group"):
        scorer.score(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scorer.score(batch).tolist() == [1, 0, 1, 0]


def test_R020_ids_of_mixed_type_group_and_none_is_refused_by_its_row():
    mixed = rows(np.array([1, "a", 1, "a"], dtype=object), [1.0, 0.0, 1.0, 1.0])
    assert decide(mixed).scores.tolist() == [1, 0.5, 1, 0.5]
    with pytest.raises(ValueError, match="uid of sample 0 is None"):
        decide(mixed | {"uid": np.array([None, None, "a", "a"], dtype=object)})


def test_R021_a_masked_response_does_not_move_the_baseline_of_its_sibling():
    batch = RolloutBatch(rows(["a", "a"], [[50.0, 0.0], [2.0, 0.0]], [0, 2]))
    advantages = grpo_advantages(batch.outcomes, batch.group_ids, scale=False)
    assert advantages.tolist() == [0, 0]
    assert decide(batch.source).weights[0].tolist() == [0, 0]


# The report's own numbers take the sample deviation, [0.7071, -0.7071]. Ours is the population's, as the paper of the
# rule has it (arXiv:2508.09726), so that the kept rewards 1 and 0 become +1 and -1.
def test_R023_the_statistics_are_those_of_the_kept_subset_or_of_the_group_as_asked():
    batch = RolloutBatch(rows(["a"] * 4, [1.0, 1.0, 0.0, 0.0], [2, 8, 3, 9]))
    full = grpo_advantages(batch.outcomes, batch.group_ids)
    subset = decide(batch, "reward_difficulty", "gfpo", k=2, metric="short")
    group = decide(batch, "reward_difficulty", "gfpo", k=2, metric="short", advantages="group")
    assert kept(subset) == kept(group) == [0, 2]
    np.testing.assert_allclose(subset.advantages, [1, 0, -1, 0], atol=1e-5)
    assert group.advantages is None
    np.testing.assert_allclose(full[[0, 2]], [0.8660, -0.8660], atol=1e-4)


def test_R030_the_mean_of_weights_is_over_valid_tokens():
    got = mean_one(torch.tensor([2.0, 2.0, 4.0, 9.0]), torch.tensor([1, 1, 1, 0]))
    assert got.tolist() == [0.75, 0.75, 1.5, 0]


def test_R031_a_score_of_a_response_does_not_collapse_with_its_length():
    zeros = torch.zeros(2, 300)
    batch = rows(["a", "b"], [0.0, 0.0], [3, 300], old_log_probs=zeros - 0.01, rollout_log_probs=zeros)
    scorer = build("scorer", "importance_ratio", level="geometric")
    mean = Pipeline(scorer, build("reweighter", "per_advantage", alpha=1.0)).decide(batch)
    np.testing.assert_allclose(mean.scores, [0.990, 0.990], atol=1e-4)
    np.testing.assert_allclose(mean.weights[:, 0], [1, 1], rtol=1e-5)
    # The product is a rule of its own, which is asked for by its name.
    product = build("scorer", "importance_ratio", level="sequence").score(batch)
    np.testing.assert_allclose(product, [0.970, 0.0498], atol=5e-4)


def test_R032_the_field_to_select_by_can_be_chosen():
    batch = rows(["a"] * 4, [-0.1, -0.2, -0.3, -0.4], outcome=torch.zeros(4))
    by_outcome = decide(batch, fields={"rm_scores": "outcome"})
    assert by_outcome.scores.tolist() == [0] * 4
    assert kept(by_outcome) == []
    # A rule on the shaped reward would have seen a signal that only the length made.
    assert decide(batch).metrics["frac_zero_std"] == 0
    assert by_outcome.metrics["frac_zero_std"] == 1


def test_R033_equal_graded_rewards_are_seen_to_carry_no_signal():
    batch = rows(["a"] * 4, [0.5] * 4)
    inside = decide(batch, "reward_difficulty")
    assert kept(inside) == [0, 1, 2, 3]
    assert inside.metrics["frac_zero_std"] == 1
    assert kept(decide(batch)) == kept(decide(batch, "reward_difficulty", "nonzero_variance")) == []


def test_R034_signal_is_a_matter_of_the_group_whatever_rewards_are_scaled_by():
    batch = RolloutBatch(rows(["a", "a", "b", "b"], [1.0, 1.0, 0.0, 1.0]))
    scaled = reinforce_advantages(batch.outcomes)
    group, num_groups = group_index(torch.tensor([0, 0, 1, 1]))
    assert no_signal(scaled, group, num_groups).tolist() == [True, False]
    assert kept(decide(batch)) == [2, 3]


def test_R035_a_rule_on_totals_drops_what_differs_in_its_components():
    components = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    batch = rows(["a", "a"], components.sum(-1).tolist(), first=components[:, 0])
    assert kept(decide(batch)) == []
    assert kept(decide(batch, fields={"rm_scores": "first"})) == [0, 1]


def test_R063_the_reward_of_all_and_of_the_kept_have_two_names():
    metrics = decide(rows(["a", "a", "b", "b"], [1.0, 1.0, 1.0, 0.0])).metrics
    assert (metrics["reward_all"], metrics["reward_kept"]) == (0.75, 0.5)


def test_R065_deciding_twice_on_a_batch_decides_the_same():
    batch = RolloutBatch(rows(list("abcd"), [0.1, 0.4, 0.3, 0.2]))
    first = decide(batch, "reward_difficulty", "topk_fraction", fraction=0.5)
    once = RolloutBatch(batch.replaced(first.updates(batch)))
    second = decide(once, "reward_difficulty", "topk_fraction", fraction=0.5)
    assert first.metrics["kept_frac"] == second.metrics["kept_frac"] == 0.5
    assert torch.equal(second.updates(once)["rollout_is_weights"], once["rollout_is_weights"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_R068_half_precision_scores_give_float32_weights(dtype):
    scores = torch.tensor([0, 0.5, 0.5, 1], dtype=dtype)
    weights = build("reweighter", "difficulty_band", low_q=0.25, high_q=0.75, focus_weight=2.0).act(scores, {})
    tokens = build("reweighter", "advantage_reweight", alpha=0.5, normalize="tokens").act(scores[None], {})
    assert weights.dtype == tokens.dtype == torch.float32
    np.testing.assert_allclose(weights, [2 / 3, 4 / 3, 4 / 3, 2 / 3], atol=1e-6)
    np.testing.assert_allclose(tokens, [[2 / 3, 1, 1, 4 / 3]], atol=1e-6)
