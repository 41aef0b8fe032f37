"""On a GPU: no two devices are mixed, the numbers are those of a CPU, and the host waits once for a decision.

The GPU is a pretended one (see `far.py`); `test_gpu.py` runs on a real one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_dataflex as df
from lightning_dataflex.core.home import at_home
from lightning_dataflex.core.tidy import TidyBatch
from tests.far import Far, FarTensor, near
from tests.laws import PER_TOKEN, a_batch, over, pipeline_of


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
    if actuator == "any_of" or scorer in ("weighted_sum", "zscore"):
        # With a part on samples and one on tokens, or a rule on the scores of all tokens.
        assert 1 < len(far.waits) <= 8
    else:
        assert far.waits == ["_to_copy"]


@over("selector", "reweighter")
@pytest.mark.parametrize("spoilt", ["some", "all"])
def test_samples_that_do_not_count_change_nothing_on_a_gpu(scorer, kind, actuator, spoilt):
    batch = a_batch(groups=6)
    rows = slice(None) if spoilt == "all" else slice(3, 7)
    # Without a valid token, and without a number that can be read.
    batch["response_mask"][0 if spoilt == "some" else rows] = 0
    for name in (*PER_TOKEN, "rm_scores"):
        batch[name] = batch[name].clone()
        batch[name][rows] = torch.nan
    expected = decided(pipeline_of(scorer, kind, actuator), batch)

    with Far():
        found = decided(pipeline_of(scorer, kind, actuator), far_away(batch))

    for name in ("rollout_is_weights", "response_mask"):
        torch.testing.assert_close(near(found[name]), expected[name])


@over("selector", "reweighter")
def test_responses_without_a_token_are_no_error_on_a_gpu(scorer, kind, actuator):
    batch = a_batch(groups=1)
    batch |= {name: batch[name][:, :0] for name in (*PER_TOKEN, "response_mask")}

    with Far():
        found = decided(pipeline_of(scorer, kind, actuator), far_away(batch))

    assert found["rollout_is_weights"].shape == (4, 0)


@pytest.mark.parametrize(("weight", "message"), [(-1.0, "a weight of -1"), (torch.inf, "an infinite weight")])
def test_what_can_be_no_weight_is_refused_on_a_gpu(weight, message):
    class Odd(df.Reweighter):
        by_mask = True

        def act(self, scores, batch, **ctx):
            return torch.where(batch.token_mask.cumsum(1) == 2, weight, 1.0)

    pipeline = df.Pipeline(pipeline_of("token_entropy", "selector", "high_entropy_tokens").scorer, Odd("none"))
    with Far(), pytest.raises(ValueError, match=message):
        pipeline.decide(far_away(a_batch()))


def test_infinite_weights_that_are_scaled_take_everything_on_a_gpu():
    class Odd(df.Reweighter):
        by_mask = True

        def act(self, scores, batch, **ctx):
            return torch.where(scores > 2.5, torch.inf, 1.0)

    def pipeline():
        return df.Pipeline(pipeline_of("token_entropy", "selector", "high_entropy_tokens").scorer, Odd())

    expected = decided(pipeline(), a_batch())
    with Far():
        found = decided(pipeline(), far_away(a_batch()))

    assert (expected["rollout_is_weights"] > 1e-6).sum() == (a_batch()["entropies"] > 2.5).sum() > 0
    torch.testing.assert_close(near(found["rollout_is_weights"]), expected["rollout_is_weights"])


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


def test_a_single_number_comes_home_whatever_its_stride():
    table = torch.arange(6.0).reshape(1, 6)

    with Far() as far:
        found = at_home({"rm_scores": FarTensor(table[:, 4]), "uid": FarTensor(torch.tensor([7]))})

    assert {name: column.tolist() for name, column in found.items()} == {"rm_scores": [4], "uid": [7]}
    assert far.waits == ["_to_copy"]


def test_two_devices_are_not_mixed_unseen():
    with Far(), pytest.raises(RuntimeError, match="same device"):
        FarTensor(torch.ones(2)) + torch.ones(2)


def test_a_sample_that_stays_without_counting_has_no_token():
    batch, rows = a_batch(), torch.arange(12) % 3 > 0
    batch["entropies"][0] = torch.nan

    with Far():
        tidy = TidyBatch(df.RolloutBatch(far_away(batch)), FarTensor(rows), by_mask=True)

        for mask in (tidy["response_mask"], tidy.batch["response_mask"]):
            assert near(mask).tolist() == (batch["response_mask"] * rows[:, None]).tolist()
        assert near(tidy["entropies"]).tolist() == torch.where(rows[:, None], batch["entropies"], 0.0).tolist()
        assert near(tidy.response_mask).tolist() == (batch["response_mask"].bool() & rows[:, None]).tolist()
        assert near(tidy.num_tokens).tolist() == (batch["response_mask"].sum(1) * rows).tolist()
    assert tidy.num_samples == 12


@over("selector", "reweighter")
@pytest.mark.parametrize("name", ["rm_scores", "advantages", "response_mask", "entropies", "old_log_probs"])
def test_a_field_may_be_elsewhere_than_the_others(scorer, kind, actuator, name):
    """As rewards of a verifier, in main memory or a list, beside tokens on a GPU."""
    batch = a_batch(groups=6)
    expected = decided(pipeline_of(scorer, kind, actuator), batch)

    for value in (batch[name], batch[name].tolist()):
        with Far():
            found = decided(pipeline_of(scorer, kind, actuator), far_away(batch) | {name: value})

        torch.testing.assert_close(near(found["rollout_is_weights"]), expected["rollout_is_weights"])
        assert isinstance(found["advantages"], FarTensor) == (name != "advantages")


def test_what_comes_from_a_device_is_waited_for():
    with Far(), pytest.raises(RuntimeError, match="not waited for"):
        FarTensor(torch.ones(2)).to("cpu", non_blocking=True)


def test_scores_may_lie_on_a_device_and_the_batch_in_main_memory():
    class There(df.Scorer):
        requires = ("entropies",)
        granularity = "token"

        def score(self, batch, step_id=0, **ctx):
            return batch["entropies"].to("far:0")

    batch = a_batch()
    batch["entropies"][3] = torch.nan
    expected = decided(pipeline_of("token_entropy", "selector", "high_entropy_tokens"), batch)

    with Far():
        found = decided(df.Pipeline(There(), df.build("selector", "high_entropy_tokens")), batch)

    assert found["rollout_is_weights"].device.type == "cpu"
    torch.testing.assert_close(found["rollout_is_weights"], expected["rollout_is_weights"])
