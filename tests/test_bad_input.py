"""Bad input: each kind has its message, which names what is wrong and shows the value."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, RolloutBatch, build, components
from lightning_dataflex.core.compat import validate_compat
from lightning_dataflex.core.registry import registered_name
from tests.laws import FIELDS, built, over, pipeline_of, scores_everything
from tests.laws import a_batch as whole_batch

NAN = float("nan")


def a_batch(**changes) -> dict:
    batch = {
        "rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "response_mask": torch.ones(4, 3),
        "uid": ["a", "a", "b", "b"],
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0]),
        "old_log_probs": torch.full((4, 3), -0.5),
    } | changes
    return {name: value for name, value in batch.items() if value is not None}


def a_pipeline(scorer="group_solve_rate", kind="selector", actuator="threshold_band", **params) -> Pipeline:
    return Pipeline(build("scorer", scorer), build(kind, actuator, **params))


each_pair = over("selector", "reweighter")


@each_pair
def test_a_missing_field_is_named_before_anything_runs(scorer, kind, actuator):
    pipeline = pipeline_of(scorer, kind, actuator)
    assert {*pipeline.scorer.requires, *pipeline.actuator.requires} <= set(pipeline.requires)
    # A batch without prompt_id is read by its uid.
    for name in [name for name in pipeline.requires if name != "prompt_id"]:
        batch = {field: value for field, value in whole_batch().items() if field != name}
        with pytest.raises(ValueError, match=rf"no field '({name}|prompt_id)'\. It has: {', '.join(batch)}\..*fields="):
            pipeline.decide(batch)


def test_a_field_under_another_name_is_suggested():
    batch = a_batch(rm_scores=None, rm_score=torch.ones(4))
    with pytest.raises(ValueError, match=re.escape('fields={"rm_scores": "rm_score"}')):
        a_pipeline().decide(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rm_scores": torch.ones(3)}, "rm_scores has 3 rows but the rollout batch has 4 samples"),
        ({"rm_scores": torch.ones(4, 2)}, r"rm_scores has shape \(4, 2\). It must be .* here \(4,\) or \(4, 3\)"),
        ({"rm_scores": torch.ones(4, 3, 1)}, r"rm_scores has shape \(4, 3, 1\)"),
        ({"rm_scores": torch.tensor(1.0)}, "rm_scores has one value but the rollout batch has 4 samples"),
        ({"rm_scores": ["good", "bad", "good", "bad"]}, "rm_scores is not numeric"),
        ({"rm_scores": [[1.0], [0.0, 1.0], [1.0], [1.0]]}, "rm_scores is not numeric"),
        ({"uid": ["a", "a", "b"]}, "uid has 3 rows but the rollout batch has 4 samples"),
        ({"uid": torch.zeros(4, 3).long()}, r"uid has shape \(4, 3\). It must be \(samples,\)"),
        ({"uid": torch.tensor(3)}, "uid has one value"),
        ({"uid": ["a", None, "b", "b"]}, "uid of sample 1 is None"),
        ({"uid": [NAN, 1.0, 1.0, 2.0]}, "uid holds NaN"),
        ({"uid": [["a"], ["a"], ["b"], ["b"]]}, "uid holds values that cannot be compared"),
        ({"response_mask": torch.ones(4)}, r"response_mask has shape \(4,\). It must be \(samples, response tokens\)"),
        ({"response_mask": torch.ones(3, 3)}, "has 4 rows but the rollout batch has 3 samples"),
    ],
)
def test_a_wrong_shape_is_shown(changes, message):
    with pytest.raises(ValueError, match=message):
        a_pipeline().decide(a_batch(**changes))


def test_tuples_of_any_length_are_ids():
    batch = a_batch(uid=[("a",), ("a",), ("a", 1), ("a", 1)])
    assert a_pipeline().decide(batch).scores.tolist() == [0.5, 0.5, 1, 1]


def test_two_lengths_are_told_apart_from_scores_too():
    with pytest.raises(ValueError, match="There are 3 scores for 4 samples"):
        build("selector", "threshold_band").act(torch.ones(3), a_batch())


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="The rollout batch has no samples"):
        a_pipeline().decide({"rm_scores": torch.ones(0), "response_mask": torch.ones(0, 3), "uid": []})
    with pytest.raises(ValueError, match=r"no field 'response_mask'\. It has: no fields"):
        a_pipeline().decide({})
    with pytest.raises(TypeError, match="A rollout batch cannot be a list"):
        a_pipeline().decide([torch.ones(3)])


@each_pair
def test_a_nan_reward_advantage_or_probability_is_not_kept_and_told(scorer, kind, actuator):
    pipeline, batch = pipeline_of(scorer, kind, actuator), whole_batch()
    if scores_everything(scorer):
        return
    field = next(name for name in FIELDS if name in pipeline.scorer.requires)
    batch[field][0] = NAN
    with pytest.warns(UserWarning, match=f"1 samples have no score.*{registered_name(pipeline.scorer)}"):
        decision = pipeline.decide(batch)
    assert not decision.keep[0].any()
    assert not decision.weights[0].any()
    assert decision.weights.isfinite().all()
    assert decision.metrics["n_nan"] == 1


@pytest.mark.parametrize("actuator", ["gfpo", "max_variance"])
def test_a_rule_on_rewards_keeps_no_sample_without_one_whatever_scored_it(actuator):
    batch = a_batch(rm_scores=torch.tensor([NAN, 0.0, 1.0, 1.0]), uid=[0, 0, 0, 0])
    params = {"k": 2} if actuator == "gfpo" else {}
    decision = a_pipeline("advantage_magnitude", "selector", actuator, **params).decide(batch)
    assert not decision.keep[0]
    assert decision.num_kept == 2


@pytest.mark.parametrize(
    ("kind", "name", "params", "message"),
    [
        ("selector", "threshold_band", {"low": 0.8, "high": 0.2}, "low is 0.8 and high is 0.2"),
        ("selector", "threshold_band", {"low": 0.5, "high": 0.5}, "low is 0.5 and high is 0.5"),
        ("selector", "threshold_band", {"low": NAN}, "low is nan"),
        ("selector", "threshold_band", {"low": 0.8, "high": 0.2, "closed": True}, "low is 0.8"),
        ("selector", "topk_fraction", {"fraction": 0.0}, r"fraction is 0.0. It must be in \(0, 1\]"),
        ("selector", "topk_fraction", {"fraction": 1.5}, "fraction is 1.5"),
        ("selector", "topk_fraction", {"fraction": NAN}, "fraction is nan"),
        ("selector", "gfpo", {"k": 0}, "k is 0"),
        ("selector", "gfpo", {"metric": "shortest"}, "metric.*'shortest'"),
        ("selector", "gfpo", {"advantages": "subsets"}, "advantages.*'subsets'"),
        ("selector", "max_variance", {"keep_fraction": 0}, "keep_fraction is 0"),
        ("reweighter", "softmax", {"temperature": 0}, "temperature is 0"),
        ("reweighter", "softmax", {"temperature": -1}, "temperature is -1"),
        ("reweighter", "difficulty_band", {"low_q": 0.8, "high_q": 0.2}, "high_q is 0.2"),
        ("reweighter", "difficulty_band", {"low_q": -0.1}, "low_q is -0.1"),
        ("reweighter", "difficulty_band", {"focus_weight": -2}, "focus_weight is -2"),
        ("reweighter", "advantage_reweight", {"alpha": 1.5}, "alpha is 1.5"),
        ("reweighter", "advantage_reweight", {"normalize": "token"}, "normalize.*'token'"),
        ("reweighter", "per_advantage", {"alpha": -1}, "alpha is -1"),
        ("scorer", "advantage_magnitude", {"agg": "median"}, "agg.*'median'"),
    ],
)
def test_a_parameter_out_of_range_is_refused_with_its_value(kind, name, params, message):
    with pytest.raises(ValueError, match=message):
        build(kind, name, **params)
    with pytest.raises(ValueError, match=message):
        components(kind)[name](**params)


def test_a_closed_band_of_one_point_is_a_band():
    assert build("selector", "threshold_band", low=0.5, high=0.5, closed=True).act(torch.tensor([0.4, 0.5]), {}) == [1]


def test_more_to_keep_than_there_is_warns_once_and_filters_nothing():
    pipeline = a_pipeline("reward_difficulty", actuator="gfpo", k=5)
    with pytest.warns(UserWarning, match="k is 5 but no group has more than 2 samples: nothing is filtered"):
        decision = pipeline.decide(a_batch())
    assert decision.keep.all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.decide(a_batch())


def test_an_unknown_estimator_and_a_group_rule_without_groups_are_refused():
    scorer, selector = build("scorer", "group_solve_rate"), build("selector", "threshold_band")
    with pytest.raises(ValueError, match=r"adv_estimator is 'gropo'\. Did you mean 'grpo'"):
        Pipeline(scorer, selector, adv_estimator="gropo")
    with pytest.raises(ValueError, match="group_solve_rate compares the samples of a group, but adv_estimator 'gae'"):
        Pipeline(scorer, selector, adv_estimator="gae")


@pytest.mark.parametrize("kind", ["selector", "reweighter"])
def test_a_granularity_that_does_not_fit_is_refused(kind):
    token_prob = build("scorer", "token_prob")
    for name, cls in components(kind).items():
        if "token" not in cls.granularities:
            with pytest.raises(ValueError, match=f"{name} takes scores of a .*, but token_prob scores"):
                validate_compat(token_prob, built(kind, name))


@pytest.mark.parametrize("kind", ["scorer", "selector", "reweighter"])
def test_every_name_misspelt_is_answered_with_the_right_one(kind):
    for name in components(kind):
        with pytest.raises(ValueError, match=f"no {kind} '{name}x'. Did you mean '{name}'"):
            build(kind, f"{name}x")


def test_rewards_per_sample_as_arrays_and_lists_are_no_bad_input():
    expected = a_pipeline().decide(a_batch()).scores.tolist()
    for rewards in (np.array([1.0, 0.0, 1.0, 1.0]), [1.0, 0.0, 1.0, 1.0], [1, 0, 1, 1], torch.tensor([1, 0, 1, 1])):
        assert a_pipeline().decide(RolloutBatch(a_batch(rm_scores=rewards))).scores.tolist() == expected
