"""The components of the ancestor's tutorial, as they stand, with no change but the import path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, Reweighter, build
from lightning_dataflex.core import registry
from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.compat import validate_compat
from lightning_dataflex.core.registry import register_scorer, register_selector
from lightning_dataflex.core.scorer import Scorer


class MySolveRate(Scorer):
    requires = ["rm_scores", "response_mask", "uid"]
    timing = "post_reward"
    granularity = "prompt"
    needs_groups = True

    def __init__(self, success_threshold: float = 0.5, **kw):
        super().__init__(**kw)
        self.success_threshold = success_threshold

    def score(self, batch, step_id, **ctx):
        per_seq = (batch.batch["rm_scores"] * batch.batch["response_mask"]).sum(-1)
        success = (per_seq > self.success_threshold).float()
        uid = np.asarray(batch.non_tensor_batch["uid"])
        out = torch.zeros_like(per_seq)
        for g in np.unique(uid):
            idx = np.where(uid == g)[0]
            out[idx] = success[idx].mean()
        return out


class MyBand(Selector):
    def __init__(self, low: float = 0.0, high: float = 1.0, **kw):
        super().__init__(**kw)
        self.low, self.high = low, high

    def act(self, scores, batch, **ctx) -> list[int]:
        s = scores.float().flatten()
        return torch.nonzero((s > self.low) & (s < self.high)).flatten().tolist()


@pytest.fixture(autouse=True)
def _registered(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_classes", {kind: dict(classes) for kind, classes in registry._classes.items()})
    register_scorer("my_solve_rate")(MySolveRate)
    register_selector("my_band")(MyBand)


NAN = float("nan")
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0], [1, 1, 1]])
UID = ["a", "b", "a", "b", "a", "a", "c"]
# Sample 4 has no valid token and sample 5 no reward: they belong to group a and must not move its rate.
OUTCOMES = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0, NAN, 1.0])
RATES = [0.5, 1.0, 0.5, 1.0, NAN, NAN, 1.0]


def per_token(dirt: float = 0.0) -> torch.Tensor:
    """The outcome on the last valid token, and something else where no token is."""
    rewards = torch.where(MASK.bool(), 0.0, dirt)
    for row, length in enumerate(MASK.sum(-1)):
        if length:
            rewards[row, length - 1] = OUTCOMES[row]
    return rewards


REWARDS = {
    "(N,)": OUTCOMES,
    "(N, L)": per_token(),
    "(N, L) with NaN padding": per_token(NAN),
    "(N, L) with infinite padding": per_token(float("inf")),
    "bfloat16": per_token(NAN).bfloat16(),
    "array": per_token(NAN).numpy(),
    "array of (N,)": OUTCOMES.numpy(),
    "lists": per_token(NAN).tolist(),
}
each_reward = pytest.mark.parametrize("rewards", list(REWARDS.values()), ids=list(REWARDS))


def batch_of(rewards) -> dict:
    return {"rm_scores": rewards, "response_mask": MASK, "uid": UID}


@each_reward
def test_used_directly(rewards):
    scores = MySolveRate().score(batch_of(rewards), step_id=0)
    np.testing.assert_array_equal(scores, RATES)
    assert MyBand(0.2, 0.8).act(scores, batch_of(rewards)) == [0, 2]


@each_reward
def test_through_build(rewards):
    scorer = build("scorer", "my_solve_rate", success_threshold=0.5)
    scores = scorer.score(batch_of(rewards), 0)
    kept = build("selector", "my_band", low=0.2, high=0.8).act(scores, batch_of(rewards))
    np.testing.assert_array_equal(scores, RATES)
    assert kept == [0, 2]


@each_reward
def test_through_a_pipeline(rewards):
    block = {
        "mechanism": "select",
        "scorer": {"name": "my_solve_rate", "params": {"success_threshold": 0.5}},
        "actuator": {"name": "my_band", "params": {"low": 0.2, "high": 0.8}},
    }
    pipeline = Pipeline.from_config(block, adv_estimator="grpo")
    with pytest.warns(UserWarning, match="1 samples have no score.*my_solve_rate"):
        decision = pipeline.decide(batch_of(rewards), step_id=0)
    np.testing.assert_array_equal(decision.scores, RATES)
    assert decision.keep.nonzero().flatten().tolist() == [0, 2]
    assert decision.weights.tolist() == [[1, 1, 1], [0] * 3, [1, 1, 0], [0] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert decision.metrics["kept_frac"].item() == pytest.approx(2 / 6)
    assert decision.metrics["n_nan"].item() == 1


@each_reward
def test_agrees_with_the_component_of_this_package(rewards):
    ours = build("scorer", "group_solve_rate").score(batch_of(rewards), step_id=0)
    np.testing.assert_allclose(ours, MySolveRate().score(batch_of(rewards), step_id=0))


def test_a_misspelt_parameter_is_refused_although_the_component_takes_any():
    with pytest.raises(ValueError, match=r"no parameter 'sucess_threshold'\. Did you mean 'success_threshold'"):
        build("scorer", "my_solve_rate", sucess_threshold=0.5)
    with pytest.raises(ValueError, match=r"no parameter 'hihg'\. Did you mean 'high'"):
        build("selector", "my_band", hihg=0.5)


def test_it_is_refused_on_an_estimator_without_groups():
    with pytest.raises(ValueError, match="my_solve_rate compares the samples of a group, but adv_estimator 'gae'"):
        validate_compat(MySolveRate(), MyBand(), "gae")


def test_a_batch_whose_samples_cannot_be_scored_keeps_nothing():
    batch = batch_of(torch.full((7,), NAN))
    with pytest.warns(UserWarning, match="6 samples have no score"):
        decision = Pipeline(MySolveRate(), MyBand()).decide(batch)
    assert decision.num_kept == 0
    assert decision.weights.abs().sum() == 0


def test_as_a_metric_it_collects_the_scores_of_its_batches():
    scorer = MySolveRate()
    scorer.update(batch_of(OUTCOMES))
    scorer.update(batch_of(OUTCOMES))
    np.testing.assert_array_equal(scorer.compute(), RATES + RATES)
    scorer.reset()
    scorer.update(batch_of(OUTCOMES))
    np.testing.assert_array_equal(scorer.compute(), RATES)


def test_a_subclass_may_call_its_base():
    class Halves(type(build("reweighter", "softmax"))):
        def act(self, scores, batch, **ctx):
            return super().act(scores, batch, **ctx) * 0.5

    class Narrow(type(build("selector", "threshold_band"))):
        def act(self, scores, batch, **ctx):
            return super().act(scores, batch, **ctx) & (scores < 0.5)

    scores = torch.tensor([0.1, float("nan"), 0.3, 0.7])
    assert Narrow().act(scores, {}) == [0, 2]
    torch.testing.assert_close(Halves().act(scores, {}), build("reweighter", "softmax").act(scores, {}))


def test_a_rule_cannot_write_into_the_batch():
    class Writes(Scorer):
        requires = ("rm_scores",)

        def score(self, batch, step_id=0, **ctx):
            batch.batch["rm_scores"] = batch.batch["rm_scores"] * 2
            return batch["rm_scores"]

    with pytest.raises(TypeError, match="cannot write 'rm_scores'"):
        Writes().score({"rm_scores": torch.ones(2)})


def test_padding_of_token_weights_and_scores_decides_nothing():
    class Inverse(Reweighter):
        def act(self, scores, batch, **ctx):
            return 1 / scores

    class Ratio(Scorer):
        requires = ("old_log_probs", "response_mask")
        granularity = "token"

        def score(self, batch, step_id=0, **ctx):
            return batch["old_log_probs"] / batch["old_log_probs"]

    batch = {
        "old_log_probs": torch.tensor([[-1.0, -2.0], [-4.0, 0.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    scores = Ratio().score(batch)
    assert scores.tolist() == [[1, 1], [1, 0]]
    weights = Inverse().act(torch.tensor([[1.0, 2.0], [4.0, 0.0]]), batch)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.5], [0.25, 0.0]]) * 3 / 1.75)


def test_the_state_of_a_scorer_is_saved():
    class Counts(Scorer):
        def __init__(self, **kw):
            super().__init__(**kw)
            self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

        def score(self, batch, step_id=0, **ctx):
            self.seen += 1
            return batch["rm_scores"]

    scorer, again = Counts(), Counts()
    scorer.score({"rm_scores": torch.ones(2)})
    again.load_state_dict(scorer.state_dict())
    assert int(again.seen) == 1


@pytest.mark.parametrize("result", [[0.0, 0.0, 1.0], [2.7], [1, 1], [0, 3], [-1]])
def test_what_is_no_list_of_indices_is_refused(result):
    class Odd(Selector):
        def act(self, scores, batch, **ctx):
            return result

    with pytest.raises(ValueError, match=r"Odd\.act returned"):
        Odd().act(torch.zeros(3), {})


@pytest.mark.parametrize(("granularity", "shape"), [("prompt", (2, 3)), ("token", (2,))])
def test_scores_of_another_granularity_are_refused(granularity, shape):
    Odd = type(
        "Odd", (Scorer,), {"granularity": granularity, "score": lambda self, batch, step_id=0: torch.zeros(shape)}
    )
    with pytest.raises(ValueError, match=f"scores of a {granularity} are"):
        Odd().score({"rm_scores": torch.zeros(2)})
