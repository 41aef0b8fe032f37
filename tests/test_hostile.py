"""Hostile input: an error of ours, or the right answer; never the words of what is underneath, never a wrong number."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_dataflex import (
    DataFlexCallback,
    DataFlexConfig,
    DataFlexPoint,
    Decision,
    Mixture,
    Pipeline,
    RolloutBatch,
    build,
    components,
)
from lightning_dataflex.cli import main
from lightning_dataflex.core.numbers import as_numbers
from lightning_dataflex.core.registry import init_parameters
from lightning_dataflex.core.samples import Layout, compacted
from lightning_dataflex.core.scorer import METRIC_OPTIONS
from lightning_dataflex.mount import LossMount, PointMount
from tests.blocks import PAIRS, blocks
from tests.clothes import ARRAYS, BOOLS, FLOATS, NUMERIC, UIDS, WHOLE, clothed, plain_batch, wrong
from tests.hostile import NAN, TRIED, check_ours
from tests.laws import PARAMS, pipeline_of

EXAMPLES = int(os.environ.get("DATAFLEX_FUZZ_EXAMPLES", "0"))
"""Inputs to try for each property; a few that are always the same without it."""
fuzzed = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# -- configurations ----------------------------------------------------------------------------------------------------


@fuzzed
@given(blocks(), st.booleans())
def test_a_configuration_works_or_is_refused_in_our_words(block: dict[str, Any], as_callback: bool) -> None:
    TRIED["configurations"] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = made_of(block, as_callback)
        except Exception as error:
            check_ours(error, block)
            return
        try:
            works(made)
        except ValueError as error:
            check_ours(error, block)
            if "has no field" not in str(error):  # which only a batch can tell
                raise


@settings(fuzzed, max_examples=max(10, EXAMPLES // 50))
@given(block=blocks())
def test_the_command_line_checks_a_file_or_refuses_it(block: dict[str, Any]) -> None:
    TRIED["files"] += 1
    content = {"model": {"class_path": "tests.toy.Toy"}, "data": {"class_path": "tests.toy.ToyData"}, "dataflex": block}
    content["trainer"] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", ["dataflex"])
        path = Path(folder) / "config.yaml"
        try:
            path.write_text(yaml.safe_dump(content), "utf-8", "surrogateescape")
        except (yaml.YAMLError, RecursionError, RuntimeError, ValueError, TypeError):
            return  # no file can hold it
        try:
            main(["check", "--config", str(path)])
        except SystemExit as exit_:
            if exit_.code != 2:
                raise


def made_of(block: dict[str, Any], as_callback: bool) -> Any:
    if as_callback and set(block) <= set(DataFlexConfig.__dataclass_fields__) and "mechanism" in block:
        return DataFlexCallback(**block).pipeline
    is_mix = isinstance(block.get("mechanism"), str) and block["mechanism"] == "mix"
    return (Mixture if is_mix else Pipeline).from_config(block)


def works(made: Any) -> None:
    """A rule that was made decides on a plain batch, with numbers that are some."""
    batch = plain_batch(0)
    if isinstance(made, Mixture):
        made.bind(["code", "logic", "math"])
        for step in range(2):
            made.observe(batch, step)
            made.end_step(step, progress=0.5)
        shares = list(made.proportions.values())
        assert np.isfinite(shares).all()
        assert abs(sum(shares) - 1) < 1e-6
        return
    if made.scorer.timing == "pre_rollout":
        assert made.scorer.score({"prompt_id": [1, 2], "pass_rate": [0.5, 0.5]}).isfinite().all()
        return
    decision = made.decide(batch, 3, progress=0.6)
    assert decision.weights.isfinite().all()
    assert (decision.weights >= 0).all()
    assert decision.weights.shape == batch["response_mask"].shape


PARAMETERS = [
    (kind, name, parameter)
    for kind in ("scorer", "selector", "reweighter", "mixer")
    for name in components(kind)  # type: ignore[arg-type]
    for parameter, each in init_parameters(components(kind)[name]).items()  # type: ignore[arg-type]
    if parameter not in METRIC_OPTIONS and each.annotation in (float, int, float | None, int | None)
]


@pytest.mark.parametrize(("kind", "name", "parameter"), PARAMETERS)
def test_no_number_is_nan_a_text_a_truth_value_or_beyond_all_bounds(kind: Any, name: str, parameter: str) -> None:
    """By a configuration and by the class alone; a text that is a number is one in a configuration."""
    cls, params = components(kind)[name], PARAMS.get(name, {})
    for value in (NAN, "x", [0.5], {"a": 1}, 10**400, -(10**5000), 1j, True, b"1"):
        for make in (functools.partial(build, kind, name), cls):
            with pytest.raises(ValueError, match=rf"({parameter}|low|high|k|floor)\b.* is ") as caught:
                make(**params | {parameter: value})
            check_ours(caught.value, value)


# -- batches -----------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A plain batch, the same with some fields in other clothes, and the names of those that hold other numbers."""
    clean = plain_batch(draw(st.integers(0, 7)))
    given_, spoilt = dict(clean), []
    for name in draw(st.lists(st.sampled_from(NUMERIC), max_size=6, unique=True)):
        values = clean[name].numpy().astype(np.float64)
        types = FLOATS | (WHOLE if name == "rollout_step" else {}) | (WHOLE | BOOLS if name == "response_mask" else {})
        dtype, form = types[draw(st.sampled_from(list(types)))], draw(st.sampled_from(list(ARRAYS)))
        given_[name] = clothed(values, dtype, form, draw(st.booleans()))
    if draw(st.booleans()):
        given_["uid"] = UIDS[draw(st.sampled_from(list(UIDS)))]
    for name in draw(st.lists(st.sampled_from(list(clean)), max_size=2, unique=True)):
        given_[name] = draw(wrong(clean[name] if name in ("uid", "domain") else clean[name].double()))
        spoilt.append(name)
    return clean, given_, spoilt


class Holder(nn.Module):
    """What a decision can be mounted to."""

    def __init__(self) -> None:
        super().__init__()
        self.dataflex = DataFlexPoint()

    def policy_loss(self, batch: Any) -> Any:
        return batch


def decided(pair: Any, batch: dict[str, Any], drop: Any, through: str) -> tuple[Decision, dict[str, Any]]:
    """The decision, and the batch with the decision in it."""
    pipeline, holder, decisions = pipeline_of(*pair), Holder(), []

    def decide(rollout: RolloutBatch) -> Decision:
        decisions.append(pipeline.decide(rollout, 4, progress=0.6))
        return decisions[0]

    kind = PointMount if through == "dataflex" else functools.partial(LossMount, through)
    mount = kind(decide, {}, drop, "rollout_is_weights")
    if drop == "rows":
        mount.finish = lambda source: compacted(RolloutBatch(source), Layout())
    mount.attach(holder)
    result = getattr(holder, through)(batch)
    return decisions[0], result


@fuzzed
@given(
    batches(),
    st.sampled_from(PAIRS),
    st.sampled_from([("mask", "dataflex"), ("rows", "dataflex"), ("weight", "dataflex"), ("mask", "policy_loss")]),
)
def test_a_batch_is_decided_on_rightly_or_refused_in_our_words(
    batch: tuple[dict[str, Any], dict[str, Any], list[str]], pair: Any, how: tuple[str, str]
) -> None:
    TRIED["batches"] += 1
    clean, given_, spoilt = batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            decision, result = decided(pair, given_, *how)
        except Exception as error:
            check_ours(error, spoilt, pair, how, {name: given_[name] for name in spoilt})
            if not spoilt:
                raise
            return
        weights = decision.weights
        assert ((weights >= 0) & weights.isfinite()).all(), (weights, pair, {name: given_[name] for name in spoilt})
        if not spoilt:
            # Some draw by the ids themselves.
            ids = given_ if pair[2] in ("bernoulli", "dots") else clean
            same(decision, result, *decided(pair, clean | {"uid": ids["uid"]}, *how))


def same(decision: Decision, result: Any, expected: Decision, other: Any) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    assert torch.equal(decision.keep, expected.keep), (decision, expected)
    close(decision.weights, expected.weights)
    close(decision.scores.float(), expected.scores.float(), equal_nan=True)
    for name in ("rollout_is_weights", "response_mask"):
        close(as_numbers(result[name], name).float(), other[name].float())
