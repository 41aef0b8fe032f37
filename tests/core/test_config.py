"""The `dataflex` block: what it accepts, what it refuses, and in what words."""

from __future__ import annotations

import pytest

from lightning_dataflex import DataFlexConfig, GroupSolveRate, ThresholdBand, TopKFraction, build
from lightning_dataflex.core.building import ComponentConfig, component
from lightning_dataflex.core.compat import GROUP_ESTIMATORS, OTHER_ESTIMATORS, validate_compat

BLOCK = {
    "mechanism": "select",
    "scorer": {"name": "group_solve_rate", "params": {"success_threshold": 0.5}},
    "actuator": {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}},
    "warmup_step": 0,
}


def test_the_block_of_the_ancestor_builds_its_parts():
    scorer, actuator = DataFlexConfig.of(BLOCK).components()
    assert (type(scorer), scorer.success_threshold) == (GroupSolveRate, 0.5)
    assert (type(actuator), actuator.low, actuator.high, actuator.closed) == (ThresholdBand, 0.2, 0.8, False)


def test_defaults_are_those_of_the_design():
    config = DataFlexConfig.of(BLOCK)
    assert (config.drop, config.on_empty, config.enforce) == ("mask", "skip", True)
    assert (config.warmup_step, config.update_step, config.weights_key) == (0, 1, "rollout_is_weights")
    assert DataFlexConfig.of(config) is config


BAND = {"low": 0.1, "high": 0.9}


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "threshold_band", "params": BAND},
        {"class_path": "lightning_dataflex.ThresholdBand", "init_args": BAND},
        {"class_path": "lightning_dataflex.selectors.ThresholdBand", "init_args": BAND},
        ComponentConfig("threshold_band", BAND),
        ThresholdBand(**BAND),
    ],
)
def test_a_component_is_given_in_any_form(spec):
    band = component("selector", spec)
    assert (type(band), band.low, band.high) == (ThresholdBand, 0.1, 0.9)


@pytest.mark.parametrize(
    "spec", ["topk_fraction", {"name": "topk_fraction"}, {"name": "topk_fraction", "params": None}]
)
def test_a_component_without_parameters_has_its_defaults(spec):
    assert vars(component("selector", spec)) == vars(TopKFraction())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "threshold_band", "params": {"hgh": 0.8}}, "no parameter 'hgh'. Did you mean 'high'"),
        ({"name": "treshold_band"}, "no selector 'treshold_band'. Did you mean 'threshold_band'"),
        ({"name": "threshold_band", "param": {}}, "no key 'param'. Did you mean 'params'"),
        (
            {"class_path": "lightning_dataflex.ThresholdBand", "init_arg": {}},
            "no key 'init_arg'. Did you mean 'init_args'",
        ),
        (
            {"class_path": "lightning_dataflex.ThresholdBand", "init_args": {"hgh": 1}},
            "no parameter 'hgh'. Did you mean",
        ),
        (
            {"class_path": "lightning_dataflex.TresholdBand"},
            "cannot be imported: .*TresholdBand.*Give package.module.Class",
        ),
        ({"class_path": "nowhere.ThresholdBand"}, "cannot be imported: No module named 'nowhere'"),
        ({"class_path": "ThresholdBand"}, "cannot be imported"),
        ({"class_path": "lightning_dataflex.GroupSolveRate"}, "GroupSolveRate"),
        ({"class_path": "os.path.join"}, "join"),
        ({"params": {}}, r"Give \{name, params\} or \{class_path, init_args\}"),
        ({"name": 3}, "Give name as text"),
        ({"name": "threshold_band", "params": [1]}, "params as a mapping"),
        (3, "The selector is 3. Give a name"),
        (None, "The selector is None. Give a name"),
    ],
)
def test_a_component_that_cannot_be_built_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        component("selector", spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "selct"}, "mechanism is 'selct'. Did you mean 'select'"),
        ({"drop": "maks"}, "drop is 'maks'. Did you mean 'mask'"),
        ({"on_empty": "skp"}, "on_empty is 'skp'. Did you mean 'skip'"),
        ({"warmup_step": -1}, "warmup_step is -1. It must be a whole number of at least 0"),
        ({"update_step": 0}, "update_step is 0. It must be a whole number of at least 1"),
        ({"warmup_step": 1.5}, "warmup_step is 1.5"),
        ({"warmup_step": True}, "warmup_step is True"),
        ({"adv_estimator": "grpoo"}, "adv_estimator is 'grpoo'. Did you mean 'grpo'"),
        ({"warmup_steps": 3}, "no key 'warmup_steps'. Did you mean 'warmup_step'"),
        ({"fields": {"rm_scores": 3}}, "fields is {'rm_scores': 3}. It must map our names to yours"),
        ({"weights_key": "domain"}, "weights_key is 'domain'. Give the name of a field that holds nothing but weights"),
        ({"on_emtpy": "skip"}, "no key 'on_emtpy'. Did you mean 'on_empty'"),
    ],
)
def test_a_bad_key_or_value_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DataFlexConfig.of(BLOCK | change)


@pytest.mark.parametrize("key", ["mechanism", "actuator"])
def test_a_block_without_a_part_is_refused(key):
    with pytest.raises(ValueError, match=f"lacks '{key}'. Give mechanism, scorer and actuator"):
        DataFlexConfig.of({k: v for k, v in BLOCK.items() if k != key}).components()


def test_the_scorer_of_the_actuators_paper_may_be_left_out():
    scorer, _ = DataFlexConfig.of({"mechanism": "select", "actuator": "threshold_band"}).components()
    assert type(scorer) is GroupSolveRate
    scorer, _ = DataFlexConfig.of({"mechanism": "select", "actuator": "limr"}).components()
    assert scorer.requires[0] == "limr_score"
    with pytest.raises(ValueError, match="lacks 'scorer', and softmax acts on any score"):
        DataFlexConfig.of({"mechanism": "reweight", "actuator": "softmax"}).components()
    with pytest.raises(ValueError, match="lacks 'actuator'"):
        DataFlexConfig.of({"mechanism": "mix"})


@pytest.mark.parametrize("block", [None, "select", ["select"]])
def test_what_is_no_block_is_refused(block):
    with pytest.raises(ValueError, match="Give a mapping with mechanism, scorer and actuator"):
        DataFlexConfig.of(block)


def test_the_mechanism_decides_where_an_actuator_is_looked_up():
    with pytest.raises(ValueError, match="no reweighter 'threshold_band'"):
        DataFlexConfig.of(BLOCK | {"mechanism": "reweight"}).components()
    with pytest.raises(ValueError, match="no mixer 'threshold_band'"):
        DataFlexConfig.of(BLOCK | {"mechanism": "mix"}).components()


@pytest.mark.parametrize("actuator", ["topk_fraction", "gfpo", "max_variance"])
def test_an_actuator_that_does_not_take_the_scorers_granularity_is_refused(actuator):
    block = BLOCK | {"scorer": "token_prob", "actuator": actuator}
    with pytest.raises(ValueError, match=f"{actuator} takes scores of a .*, but token_prob scores each token"):
        DataFlexConfig.of(block).components()


@pytest.mark.parametrize("estimator", sorted(OTHER_ESTIMATORS))
def test_group_parts_are_refused_where_the_estimator_has_no_groups(estimator):
    solve_rate, gfpo = build("scorer", "group_solve_rate"), build("selector", "gfpo")
    message = f"compares the samples of a group, but adv_estimator '{estimator}' has no groups"
    with pytest.raises(ValueError, match=f"group_solve_rate {message}"):
        validate_compat(solve_rate, build("selector", "threshold_band"), estimator)
    with pytest.raises(ValueError, match=f"gfpo {message}"):
        validate_compat(build("scorer", "reward_difficulty"), gfpo, estimator)
    with pytest.raises(ValueError, match=message):
        DataFlexConfig.of(BLOCK | {"adv_estimator": estimator}).components()


@pytest.mark.parametrize("estimator", [*sorted(GROUP_ESTIMATORS), None])
def test_group_parts_fit_group_estimators_and_an_unknown_one(estimator):
    scorer, selector = build("scorer", "group_solve_rate"), build("selector", "gfpo")
    assert validate_compat(scorer, selector, estimator) is None


def test_parts_without_groups_fit_any_estimator_that_exists():
    scorer, selector = build("scorer", "reward_difficulty"), build("selector", "threshold_band")
    for estimator in sorted(OTHER_ESTIMATORS | GROUP_ESTIMATORS):
        assert validate_compat(scorer, selector, estimator) is None
    with pytest.raises(ValueError, match=r"adv_estimator is 'gea'\. Did you mean 'gae'"):
        validate_compat(scorer, selector, "gea")
