"""From a batch to a decision, and from a decision into the batch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from lightning_dataflex import Mixer, Pipeline, RolloutBatch, Selector, build
from lightning_dataflex.core.rows import measure_of
from lightning_dataflex.core.summary import Summary

NAN = float("nan")
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])


def a_batch(**more) -> dict:
    return {
        "rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "response_mask": MASK,
        "uid": ["a", "a", "b", "b"],
        "advantages": torch.tensor([1.0, -1.0, 0.0, 0.0]),
    } | more


def a_pipeline(scorer="group_solve_rate", kind="selector", actuator="threshold_band", **params) -> Pipeline:
    return Pipeline(build("scorer", scorer), build(kind, actuator, **params))


class Tokens(Selector):
    """Keeps tokens above a half."""

    granularities = ("token",)

    def act(self, scores, batch, **ctx):
        return scores > 0.5


def test_a_selection_is_scores_keep_weights_and_metrics():
    decision = a_pipeline().decide(a_batch())
    assert decision.scores.tolist() == [0.5, 0.5, 1.0, 1.0]
    assert decision.keep.tolist() == [True, True, False, False]
    assert decision.weights.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert decision.advantages is None
    assert decision.num_kept == 2


def test_the_metrics_of_a_selection():
    metrics = {k: v.item() for k, v in a_pipeline().decide(a_batch()).metrics.items()}
    expected = {
        "kept_frac": 2 / 4,
        "weight_mean": 4 / 9,
        "weight_std": np.std([1] * 4 + [0] * 5),
        "ess": 2,
        "n_nan": 0,
        "frac_zero_std": 1 / 2,
        "dropped_solved": 1,
        "dropped_failed": 0,
        "dropped_rule": 0,
        "dropped_nan": 0,
        "reward_all": 3 / 4,
        "reward_kept": 1 / 2,
    }
    assert list(metrics) == list(expected)
    assert metrics == pytest.approx(expected)


def test_the_effective_sample_size_of_weights():
    batch = a_batch(advantages=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    decision = a_pipeline("advantage_magnitude", "reweighter", "per_advantage", alpha=1.0).decide(batch)
    assert decision.metrics["ess"].item() == pytest.approx(10**2 / 30)
    assert decision.metrics["kept_frac"].item() == 1


def test_keeping_tokens_weighs_tokens():
    probs = torch.tensor([[0.9, 0.1, 0.6], [0.2, NAN, NAN], [0.7, 0.9, NAN], [0.1, 0.2, 0.3]])
    decision = Pipeline(build("scorer", "token_prob"), Tokens()).decide(a_batch(old_log_probs=probs.log()))
    expected = [[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert decision.weights.tolist() == expected == decision.keep.float().tolist()
    assert decision.metrics["kept_frac"].item() == pytest.approx(4 / 9)
    batch = RolloutBatch(a_batch())
    assert decision.updates(batch)["response_mask"].tolist() == expected


def test_deciding_changes_nothing_in_the_batch():
    batch = a_batch()
    before = {k: v.clone() if torch.is_tensor(v) else list(v) for k, v in batch.items()}
    a_pipeline("reward_difficulty", actuator="max_variance").decide(batch)
    assert batch.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(batch[name], value) if torch.is_tensor(value) else batch[name] == value


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_a_mask_blanks_what_is_not_kept_in_its_own_type(dtype):
    batch = RolloutBatch(a_batch(response_mask=MASK.to(dtype)))
    decision = a_pipeline().decide(batch)
    masked, weighted = decision.updates(batch, drop="mask"), decision.updates(batch, drop="weight")
    assert masked["response_mask"].dtype == dtype
    assert masked["response_mask"].sum(-1).tolist() == [3, 1, 0, 0]
    assert torch.equal(masked["original_response_mask"], batch["response_mask"])
    assert set(weighted) == {"rollout_is_weights"}


def test_weights_that_are_there_are_multiplied_wherever_they_are():
    there = torch.tensor([[2.0, 0.5, NAN], [3.0, NAN, NAN], [NAN, 1.0, 1.0], [1.0, 1.0, 1.0]])
    expected = [[2, 0.5, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    batch = RolloutBatch(a_batch(rollout_is_weights=there, response_mask=mask))
    assert a_pipeline().decide(batch).updates(batch)["rollout_is_weights"].tolist() == expected
    batch = RolloutBatch(a_batch(rollout_is_weights=torch.tensor([2.0, 3.0, 1.0, 1.0])))
    assert a_pipeline().decide(batch).updates(batch)["rollout_is_weights"].sum(-1).tolist() == [6, 3, 0, 0]
    batch = RolloutBatch(a_batch(is_weights=there, response_mask=mask))
    assert a_pipeline().decide(batch).updates(batch, weights_key="is_weights")["is_weights"].tolist() == expected


@pytest.mark.parametrize("shape", ["(N,)", "(N, L)"])
def test_advantages_within_the_kept_subset_replace_those_of_the_batch(shape):
    rewards, lengths = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1, 3, 2, 3])
    mask = (torch.arange(3) < lengths[:, None]).long()
    old = torch.full((4,), 9.0) if shape == "(N,)" else torch.full((4, 3), 9.0)
    batch = RolloutBatch(a_batch(rm_scores=rewards, uid=[0] * 4, response_mask=mask, advantages=old))
    updates = a_pipeline("reward_difficulty", actuator="gfpo", k=2).decide(batch).updates(batch)
    per_sample = torch.tensor([1.0, 0.0, -1.0, 0.0])
    expected = per_sample if shape == "(N,)" else per_sample[:, None] * mask
    torch.testing.assert_close(updates["advantages"], expected, atol=1e-5, rtol=0)
    assert updates["original_advantages"] is old


def test_the_advantages_of_the_group_stay_when_asked():
    batch = RolloutBatch(a_batch())
    for actuator, params in (("gfpo", {"k": 1}), ("max_variance", {})):
        decision = a_pipeline("reward_difficulty", actuator=actuator, advantages="group", **params).decide(batch)
        assert decision.advantages is None
        assert "advantages" not in decision.updates(batch)


def test_a_second_decision_reads_the_batch_as_it_was_before_the_first():
    batch = RolloutBatch(a_batch())
    first = a_pipeline("reward_difficulty", actuator="gfpo", k=1)
    second = a_pipeline("advantage_magnitude", actuator="topk_fraction")
    once = RolloutBatch(batch.replaced(first.decide(batch).updates(batch)))
    again = second.decide(once)
    assert once["response_mask"].sum(-1).tolist() == [0, 1, 2, 0]
    assert again.keep.tolist() == second.decide(batch).keep.tolist() == [True, True, False, False]
    assert again.updates(once)["rollout_is_weights"].sum(-1).tolist() == [0, 1, 0, 0]


def test_a_batch_without_a_mask_has_one_weight_per_sample():
    batch = RolloutBatch({k: v for k, v in a_batch().items() if k != "response_mask"})
    scores = build("scorer", "group_solve_rate").score(batch)
    keep = build("selector", "threshold_band").keep(scores, batch)
    assert keep.tolist() == [True, True, False, False]
    assert batch.token_mask.tolist() == [[True]] * 4


def test_keeping_all_leaves_out_padding_alone():
    mask = MASK.clone()
    mask[3] = 0
    decision = a_pipeline().keep_all(a_batch(response_mask=mask, rm_scores=torch.tensor([1.0, NAN, 1.0, 1.0])))
    assert decision.keep.tolist() == [True, True, True, False]
    assert torch.equal(decision.weights, mask.float())
    assert not decision.fell_back


def test_a_rule_that_keeps_nothing_may_keep_what_can_be_scored():
    batch = a_batch(rm_scores=torch.tensor([1.0, NAN, 1.0, 1.0]))
    decision = a_pipeline().decide(batch, keep_all_if_empty=True)
    assert decision.fell_back
    assert decision.keep.tolist() == [True, False, True, True]
    assert decision.num_kept == 3


def test_a_response_without_a_token_is_not_kept_whatever_its_score():
    batch = {"response_mask": torch.tensor([[1, 0], [0, 0], [1, 1]])}
    assert build("selector", "threshold_band").act(torch.tensor([0.5, 0.5, 0.5]), batch) == [0, 2]
    assert build("reweighter", "per_advantage", alpha=1.0).act(torch.tensor([2.0, 9.0, 0.5]), batch)[1] == 0


def test_what_stands_in_padding_is_no_score_of_a_token():
    scores, batch = torch.tensor([[0.9, 0.1, NAN], [0.9, NAN, 0.9]]), {"response_mask": MASK[[2, 2]]}
    assert Tokens().keep(scores, batch).tolist() == [[True, False, False], [False] * 3]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("scores", [[NAN, NAN], [NAN, 1.0], [1.0, 1.0]])
def test_weights_have_one_type_whether_or_not_there_are_scores(scores, dtype, expected):
    rule = build("reweighter", "per_advantage", alpha=1.0)
    assert rule.act(torch.tensor(scores, dtype=dtype), {}).dtype == expected


def test_an_infinite_advantage_measures_nothing():
    batch = RolloutBatch({"advantages": torch.tensor([float("inf"), -2.0]), "response_mask": torch.ones(2, 3)})
    assert measure_of(batch, torch.ones(2), "abs_advantage").tolist() == [0, 6]
    assert measure_of(batch, torch.ones(2, 3), "abs_advantage").tolist() == [[0] * 3, [2] * 3]


@pytest.mark.parametrize(
    ("uid", "size", "expected"),
    [([7, 7, 8, 8], 2, 2), ([7, 7, 7, 7, 8, 8], 2, 2), ([7, 7, 7, 8, 8], 2, None), ([7, 7, 8, 8], None, None)],
)
def test_groups_have_a_size_where_all_are_a_multiple_of_it(uid, size, expected):
    assert Summary({"uid": torch.tensor(uid)}, of_tokens=False).group_size(size) == expected


def test_missing_scores_are_told_once():
    pipeline, batch = a_pipeline(), a_batch(rm_scores=torch.tensor([1.0, NAN, 1.0, 0.0]))
    with pytest.warns(UserWarning, match="1 samples have no score: .* group_solve_rate reads, is NaN"):
        pipeline.decide(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipeline.decide(batch).metrics["n_nan"] == 1


def test_the_estimator_of_the_module_is_checked_where_the_block_names_none():
    block = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"}
    with pytest.raises(ValueError, match="'gae' has no groups"):
        Pipeline.from_config(block, adv_estimator="gae")


def test_a_mixer_does_not_decide_on_samples():
    class Even(Mixer):
        granularities = ("prompt",)

        def act(self, scores, batch, **ctx):
            return torch.ones(2) / 2

    with pytest.raises(ValueError, match="A Mixer decides on domains"):
        Pipeline(build("scorer", "group_solve_rate"), Even()).decide(a_batch())
