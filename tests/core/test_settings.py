"""Blocks whose keys go together, and those whose keys do not."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dataflex import DataFlexConfig, Selector
from lightning_dataflex.core.config import REPORTING, RefillConfig

NAN = float("nan")
SELECT = {"mechanism": "select", "actuator": "threshold_band"}
MIX = {"mechanism": "mix", "actuator": "reward_gap"}
BEFORE = {"mechanism": "select", "scorer": "mopps"}
SCREENS = {"mechanism": "select", "scorer": {"name": "speed", "params": {"num_screening": 2}}, "refill": {"groups": 2}}


def test_a_block_is_what_it_says_and_else_the_default() -> None:
    defaults = {
        "scorer": None,
        "domains": None,
        "mount": None,
        "drop": "mask",
        "trim": False,
        "shared_fields": None,
        "token_fields": None,
        "refill": None,
        "on_empty": "skip",
        "warmup_step": 0,
        "update_step": 1,
        "scope": "global",
        "fields": None,
        "weights_key": "rollout_is_weights",
        "enforce": True,
        "adv_estimator": None,
        "label": None,
        "trace": None,
        "trace_every": 1,
        "trace_rows": 1_000_000,
    }
    config = vars(DataFlexConfig.of(SELECT))
    assert {name: config[name] for name in SELECT | defaults} == SELECT | defaults
    described = DataFlexConfig.of(SELECT | {"drop": "rows", "trim": True}).described()
    told = SELECT | defaults | {"drop": "rows", "trim": True}
    written = {"scorer", "actuator", *REPORTING}
    assert {name: described[name] for name in told if name not in written} == {
        name: str(value) for name, value in told.items() if name not in written
    }
    assert not described.keys() & written


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("groups", [1, 1_000_000], [0, 1_000_001, 1.0]),
        ("max_rounds", [1, 1_000_000], [0, 1_000_001, True]),
        ("max_age", [0, 1_000_000], [-1, 1_000_001, None]),
        ("rollout", ["generate", "_x"], ["a.b", "", "__class__", 3]),
    ],
)
def test_refills(key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(RefillConfig.of({"groups": 3} | {key: value}), key) == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^refill\.{key} is "):
            RefillConfig.of({"groups": 3} | {key: value})


def test_a_refill_has_groups_and_is_typed_once() -> None:
    typed = RefillConfig(3)
    assert (typed.max_rounds, typed.max_age, typed.rollout) == (10, 1, "rollout")
    assert RefillConfig.of(typed) is typed
    assert RefillConfig.of(None) is None
    for block, message in (
        (3, r"^refill is 3\. Give a mapping"),
        ({}, r"^refill lacks 'groups'"),
        ({"groups": 3, "age": 1}, r"^refill has no key 'age'. Did you mean 'max_age'"),
    ):
        with pytest.raises(ValueError, match=message):
            RefillConfig.of(block)  # type: ignore[arg-type]
    assert DataFlexConfig.of(SELECT | {"refill": {"groups": 3}}).refill == typed


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (SELECT | {"refill": {"groups": 3}, "on_empty": "keep"}, r"^on_empty is 'keep', but refill goes on until"),
        (SELECT | {"refill": {"groups": 3}, "enforce": False}, r"^enforce is False, but refill cannot try"),
        (SELECT | {"refill": {"groups": 3}, "mount": "loss"}, r"^mount is 'loss', but refill acts where .*: point"),
        (MIX | {"refill": {"groups": 3}}, r"^mechanism is 'mix', but refill replaces"),
        (MIX | {"scope": "rank"}, r"^scope is 'rank', but all ranks draw by the same"),
        (MIX | {"drop": "weight"}, r"^drop is 'weight', which mechanism: mix does not read"),
        (MIX | {"drop": "rows", "trim": True}, r"^drop is 'rows', which mechanism: mix"),
        (MIX | {"on_empty": "keep"}, r"^on_empty is 'keep', which mechanism: mix"),
        (MIX | {"weights_key": "w"}, r"^weights_key is 'w', which mechanism: mix"),
        (SELECT | {"domains": ["a"]}, r"^domains is \['a'\], which only mechanism: mix reads"),
        ({"mechanism": "select"}, r"^The dataflex block lacks 'actuator'"),
        ({"actuator": "threshold_band"}, r"^The dataflex block lacks 'mechanism'"),
    ],
)
def test_keys_that_do_not_go_together(block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataFlexConfig.of(block)


@pytest.mark.parametrize("mount", [None, "point"])
def test_keys_that_go_together(mount: str | None) -> None:
    assert DataFlexConfig.of(SELECT | {"refill": {"groups": 3}, "mount": mount}).mount == mount
    for drop, at in (
        ("rows", mount),
        ("rows", "on_train_batch_start"),
        ("mask", "loss"),
        ("weight", "on_before_backward"),
    ):
        assert DataFlexConfig.of(SELECT | {"drop": drop, "mount": at}).components()
    assert DataFlexConfig.of(MIX | {"mount": mount}).components()
    assert DataFlexConfig.of(BEFORE | {"mount": mount}).components()
    assert DataFlexConfig.of(SCREENS | {"mount": mount}).components()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (SELECT | {"drop": "rows", "mount": "loss"}, r"^drop is 'rows', but at mount 'loss' the policy has seen"),
        (SELECT | {"drop": "rows", "mount": "on_before_backward"}, r"^drop is 'rows', but at mount"),
        (SELECT | {"mount": "on_before_backward"}, r"^drop is 'mask', but at mount 'on_before_backward' the loss"),
        (
            {"mechanism": "select", "actuator": "gfpo", "drop": "weight", "mount": "on_before_backward"},
            "^gfpo changes advantages, but at mount",
        ),
        (
            BEFORE | {"mechanism": "reweight", "actuator": "softmax"},
            r"^mopps scores prompts before .* is 'rew",
        ),
        (BEFORE | {"on_empty": "keep"}, r"^on_empty is 'keep', but mopps decides .* Leave it out\.$"),
        (BEFORE | {"weights_key": "w"}, r"^weights_key is 'w', but mopps .* Leave it out\.$"),
        (BEFORE | {"scope": "rank"}, r"^scope is 'rank', but mopps .* Leave it out\.$"),
        (BEFORE | {"drop": "weight"}, r"^drop is 'weight', but mopps .* or give it to the block of a selector\.$"),
        (BEFORE | {"drop": "rows", "trim": True}, r"^drop is 'rows', but mopps"),
        (BEFORE | {"refill": {"groups": 2}}, r"^refill is .*, but mopps .* or give it to the block of a selector"),
        (BEFORE | {"mount": "loss"}, r"^mount is 'loss', but mopps learns from what passes"),
        (SCREENS | {"scope": "rank"}, r"^scope is 'rank', but speed"),
        (SCREENS | {"refill": None}, r"^speed generates the rest of promising groups only"),
        ({"mechanism": "reweight", "scorer": "outcome"}, r"^The dataflex block lacks 'actuator'"),
        ({"mechanism": "select", "scorer": "outcome"}, r"^The dataflex block lacks 'actuator'"),
        ({"mechanism": "reweight", "actuator": "softmax"}, r"^The dataflex block lacks 'scorer', and softmax acts"),
        ({"mechanism": "mix", "actuator": "adarft"}, r"^The mixer 'adarft' needs|^The mixer needs to be made for"),
    ],
)
def test_components_that_do_not_go_with_their_block(block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataFlexConfig.of(block).components()


def test_a_rule_on_prompts_brings_its_selector() -> None:
    scorer, selector = DataFlexConfig.of(BEFORE).components()
    assert type(selector) is type(scorer.default_selector())
    assert isinstance(selector, Selector)
