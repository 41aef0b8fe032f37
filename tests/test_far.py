"""On a GPU: no two devices are mixed, the numbers are those of a CPU, and the host waits once for a decision.

The GPU is a pretended one (see `far.py`); `test_gpu.py` runs on a real one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from far import Far, FarTensor, near
from laws import a_batch, over, pipeline_of

import lightning_dataflex as df


def far_away(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: FarTensor(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def decided(pipeline: df.Pipeline, batch: dict[str, Any]) -> dict[str, Any]:
    local = df.RolloutBatch.of(batch)
    return local.replaced(pipeline.decide(local, progress=0.5).updates(local))


@over("selector", "reweighter")
def test_a_decision_on_a_gpu_is_that_on_a_cpu_and_is_waited_for_once(scorer, kind, actuator):
    batch = a_batch(groups=6)
    expected = decided(pipeline_of(scorer, kind, actuator), batch)

    with Far() as far:
        found = decided(pipeline_of(scorer, kind, actuator), far_away(batch))

    assert isinstance(found["rollout_is_weights"], FarTensor)
    torch.testing.assert_close(near(found["rollout_is_weights"]), expected["rollout_is_weights"])
    assert torch.equal(near(found["response_mask"]), expected["response_mask"])
    on_samples = near(pipeline_of(scorer, kind, actuator).decide(batch, progress=0.5).scores).dim() == 1
    if on_samples and not has_a_part_on_tokens(scorer, actuator):
        assert far.waits == ["_to_copy"]
    # For the mask, for what can be scored and read, for the range of weights or a quantile, and for the numbers.
    assert len(far.waits) <= (11 if has_a_part_on_tokens(scorer, actuator) else 7 if actuator == "gtpo" else 5)


def has_a_part_on_tokens(scorer: str, actuator: str) -> bool:
    return actuator == "any_of" or scorer in ("weighted_sum", "zscore")


@pytest.mark.parametrize("mixer", df.components("mixer"))
def test_a_mixture_is_that_of_a_cpu(mixer):
    params = {"difficulty": {"code": 0.0, "logic": 1.0, "math": 2.0}} if mixer == "adarft" else {}
    block = {"mechanism": "mix", "domains": ["code", "logic", "math"], "actuator": {"name": mixer, "params": params}}
    here, there = df.Mixture.from_config(block), df.Mixture.from_config(block)

    here.observe(a_batch())
    with Far() as far:
        there.observe(far_away(a_batch()))
    for mixture in (here, there):
        mixture.end_step(0, progress=0.5)

    assert there.proportions == here.proportions
    assert len(far.waits) == 1


@pytest.mark.parametrize("scorer", ["group_solve_rate", "token_entropy"])
def test_a_mask_that_is_none_is_still_refused(scorer):
    batch = a_batch()
    batch["response_mask"] = torch.where(batch["response_mask"] > 0, 0.0, -torch.inf)
    actuator = "threshold_band" if scorer == "group_solve_rate" else "high_entropy_tokens"

    with Far(), pytest.raises(ValueError, match="response_mask holds -inf"):
        pipeline_of(scorer, "selector", actuator).decide(far_away(batch))


@pytest.mark.parametrize("actuator", ["threshold_band", "gfpo"])
def test_a_mask_that_is_none_is_refused_by_each_of_several_ranks(actuator, monkeypatch):
    monkeypatch.setattr("lightning_dataflex.core.global_batch.num_ranks", lambda group: 2)
    monkeypatch.setattr("lightning_dataflex.core.global_batch.exchanged", lambda own, *_: own())
    batch = a_batch()
    batch["response_mask"] = torch.where(batch["response_mask"] > 0, 1, -1)

    with Far(), pytest.raises(ValueError, match="response_mask holds -1"):
        pipeline_of("outcome", "selector", actuator).decide(far_away(batch))


def test_two_devices_are_not_mixed_unseen():
    with Far(), pytest.raises(RuntimeError, match="same device"):
        FarTensor(torch.ones(2)) + torch.ones(2)
