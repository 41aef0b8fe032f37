"""A decision's work grows in a straight line with the batch: operations are counted, nothing is timed."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch

import lightning_dataflex as df
from benchmarks.memory import Counted, num_calls, peak_bytes
from lightning_dataflex.core import rollout
from lightning_dataflex.functional import blocks
from lightning_dataflex.relay import Relay
from tests import toy
from tests.laws import PARAMS, a_batch, over, pipeline_of, together

NUM_GROUPS = 48


def of_groups(num: int, tokens: int = 6) -> dict[str, Any]:
    """So many groups of four, each with a text of its own as id."""
    batch = together(*(a_batch(seed, groups=4, tokens=tokens) for seed in range(num // 4)))
    return batch | {"uid": [f"prompt {i // 4}" for i in range(4 * num)]}


def work_of(decide: Any) -> tuple[int, int]:
    """Numbers that PyTorch reads and writes, and Python functions that are called."""
    with Counted() as counted:
        decide()
    return counted.num_numbers, num_calls(decide)


@over("selector", "reweighter")
def test_twice_the_samples_are_twice_the_work(scorer, kind, actuator):
    pipeline = pipeline_of(scorer, kind, actuator)

    def work(batch: dict[str, Any]) -> tuple[int, int]:
        return work_of(partial(pipeline.decide, batch, progress=0.5))

    once, twice = work(of_groups(NUM_GROUPS)), work(of_groups(2 * NUM_GROUPS))

    assert twice[0] <= 2.1 * once[0]
    assert twice[1] <= 2.1 * once[1]


class Unsearched(list):
    """Names that must not be looked for one by one."""

    def __contains__(self, name: object) -> bool:
        raise AssertionError(f"A list of {len(self)} domains is searched for {name!r}.")

    index = count = __contains__


def a_mixture(mixer: str, num_domains: int) -> df.Mixture:
    names = [str(i) for i in range(num_domains)]
    floor = {"floor": 0.0} if "floor" in inspect.signature(df.components("mixer")[mixer]).parameters else {}
    params = floor | ({"difficulty": {name: float(name) for name in names}} if mixer in PARAMS else {})
    block = {"mechanism": "mix", "domains": names, "actuator": {"name": mixer, "params": params}}
    mixture = df.Mixture.from_config(block)
    mixture.domains = mixture.actuator.domains = mixture.stats.domains = Unsearched(mixture.domains)
    return mixture


@pytest.mark.parametrize("mixer", df.components("mixer"))
def test_twice_the_domains_are_twice_the_work(mixer):
    def work(num_domains: int) -> tuple[int, int]:
        mixture, batch = a_mixture(mixer, num_domains), of_groups(NUM_GROUPS)
        batch["domain"] = [str(i % num_domains) for i in range(len(batch["uid"]))]

        def step() -> None:
            mixture.observe(batch)
            mixture.end_step(0, progress=0.5)
            mixture.load_state_dict(mixture.state_dict())

        step()
        return work_of(step)

    once, twice = work(128), work(256)

    assert twice[0] <= 2.1 * once[0]
    assert twice[1] <= 2.1 * once[1]


def test_a_sampler_does_not_look_for_each_domain():
    sampler = df.DomainMixtureSampler([str(i) for i in range(64)], batch_size=8)
    shares = {str(i): 1 / 64 for i in range(64)}
    sampler.domains = Unsearched(sampler.domains)

    sampler.set_proportions(shares)
    sampler.load_state_dict(sampler.state_dict())

    assert 0 <= next(iter(sampler)) < 64


@pytest.mark.parametrize(
    ("scorer", "kind", "actuator"),
    [
        ("group_solve_rate", "selector", "threshold_band"),
        ("outcome", "selector", "gfpo"),
        ("outcome", "selector", "max_variance"),
        ("advantage_magnitude", "selector", "cppo"),
        ("sequence_entropy", "reweighter", "grpo_s"),
        ("advantage_magnitude", "reweighter", "softmax"),
    ],
)
def test_a_decision_on_samples_needs_no_more_than_one_table_beside_what_it_writes(scorer, kind, actuator, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 2**12)
    pipeline, batch = pipeline_of(scorer, kind, actuator), of_groups(NUM_GROUPS)
    batch |= {name: value.repeat(1, 50) for name, value in batch.items() if getattr(value, "ndim", 0) == 2}

    def written() -> Any:
        local = df.RolloutBatch.of(batch)
        return local.replaced(pipeline.decide(local, progress=0.5).updates(local))

    assert peak_bytes(written) <= 4 * batch["response_mask"].numel()


def test_callbacks_of_a_step_tell_ids_apart_once(monkeypatch):
    calls = []
    real = rollout.told_apart
    monkeypatch.setattr(rollout, "told_apart", lambda values, *name: calls.append(values) or real(values, *name))
    batches = [
        batch | {"uid": [f"prompt {uid}" for uid in batch["uid"].tolist()]}
        for batch in (toy.rollout(0), toy.rollout(1))
    ]
    block = {"scorer": "group_solve_rate", "actuator": "threshold_band"}
    callbacks = [
        df.DataFlexCallback("select", **block),
        df.DataFlexCallback("select", actuator="nonzero_variance"),
        df.DataFlexCallback("reweight", scorer="group_std", actuator="softmax"),
    ]

    toy.fit(toy.Toy(), callbacks, batches)

    assert sum(isinstance(values, list) for values in calls) == 2


def test_what_was_read_is_not_read_again_from_a_batch_that_somebody_has_changed():
    relay, batch = Relay(), {"uid": ["a", "a"], "response_mask": torch.ones(2, 2)}
    reading = relay.reading(batch, {})
    assert reading.groups[1] == 1
    result = reading.replaced({"rollout_is_weights": torch.ones(2, 2)})
    relay.hand_on(reading, result)

    assert relay.reading(dict(result) | {"uid": ["a", "b"]}, {}).groups[1] == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_read_is_not_read_again_from_a_batch_whose_fields_somebody_has_changed(in_place):
    relay, batch = Relay(), {"rm_scores": torch.zeros(2), "response_mask": torch.ones(2, 2)}
    reading = relay.reading(batch, {})
    assert reading.outcomes.tolist() == [0, 0]
    relay.hand_on(reading, batch)
    if in_place:
        batch["rm_scores"] += 1
    else:
        batch["rm_scores"] = torch.ones(2)

    assert relay.reading(batch, {}).outcomes.tolist() == [1, 1]


def test_sums_of_large_tables_are_those_of_small_ones():
    torch.manual_seed(0)
    mask, rewards = torch.rand(3000, 200) < 0.7, torch.randn(3000, 200)
    rewards[7, 3] = rewards[2500, 150] = torch.nan

    found = df.RolloutBatch({"response_mask": mask.long(), "rm_scores": rewards})

    parts = [torch.where(m, r, torch.zeros(())).sum() for m, r in zip(mask, rewards)]
    torch.testing.assert_close(found.outcomes, torch.stack(parts), equal_nan=True)
    assert found.num_tokens.tolist() == [int(row.sum()) for row in mask]
