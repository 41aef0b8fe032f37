"""The laws that every component keeps: no surprise numbers, stable ties, a mean of one, no gradient of its own."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex import Pipeline, RolloutBatch, build, components
from lightning_dataflex.functional.loss import policy_loss
from tests.laws import FIELDS, HALF, PER_TOKEN, a_batch, built, over, pipeline_of, scorer_of, scores_everything
from tests.ranks import taken

NAN, INF = float("nan"), float("inf")
WIDE = {"name": "threshold_band", "params": {"low": -1e4, "high": 1e4}}
NOWHERE = {"name": "threshold_band", "params": {"low": 1e4, "high": 2e4}}
EVERYTHING = {
    "threshold_band": WIDE["params"],
    "online_difficulty_filter": WIDE["params"],
    "vcrl": {"kappa": 0.0},
    "limr": {"threshold": -1.0},
    "nonzero_variance": {},
    "variance_top_k": {"fraction": 1.0},
    "variance_top_p": {"p": 1.0, "shares": "softmax"},
    "dots": {"fraction": 1.0},
    "selective_backprop": {"keep": 1.0},
    "high_entropy_tokens": {"fraction": 1.0},
    "lopti": {"part": "high", "threshold": 0.0},
    "all_of": {"selectors": [WIDE, WIDE]},
    "any_of": {"selectors": [WIDE, NOWHERE]},
    "not_": {"selector": NOWHERE},
    "topk_fraction": {"fraction": 1.0},
    "gfpo": {"k": 4, "advantages": "group"},
    "max_variance": {"keep_fraction": 1.0, "advantages": "group"},
    "cppo": {"pruning_rate": 0.0},
    "nearest": {"fraction": 1.0},
}


def filled(rm_scores: float, advantages: float, old_log_probs: float, **more: float) -> dict:
    """One number in each field; those of other policies are the policy's own."""
    batch = a_batch()
    values = {"rm_scores": rm_scores, "advantages": advantages} | dict.fromkeys(PER_TOKEN[1:], old_log_probs)
    values |= {"entropies": abs(old_log_probs)} | dict.fromkeys(FIELDS[7:], rm_scores) | more
    return batch | {name: torch.full_like(batch[name], value) for name, value in values.items()}


def in_half(dtype: torch.dtype) -> dict:
    batch = a_batch()
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def without_tokens() -> dict:
    batch = a_batch()
    return batch | {"response_mask": batch["response_mask"] * 0}


LIMITS = {
    "all equal": lambda: filled(rm_scores=0.5, advantages=1.0, old_log_probs=-1.0),
    "all solved": lambda: filled(rm_scores=1.0, advantages=0.0, old_log_probs=0.0),
    "all failed": lambda: filled(rm_scores=0.0, advantages=0.0, old_log_probs=-INF),
    "no score anywhere": lambda: filled(rm_scores=NAN, advantages=NAN, old_log_probs=NAN),
    "infinite": lambda: filled(rm_scores=INF, advantages=-INF, old_log_probs=0.0),
    "huge": lambda: filled(rm_scores=1e30, advantages=-3e38, old_log_probs=-1e30),
    "one sample": lambda: taken(a_batch(), [3]),
    "groups of one": lambda: taken(a_batch(), [0, 1, 2]),
    "only padding": without_tokens,
    "no tokens at all": lambda: {k: v[:, :0] if np.ndim(v) == 2 else v for k, v in a_batch().items()},
    "bfloat16": lambda: in_half(torch.bfloat16),
    "float16": lambda: in_half(torch.float16),
}


def finite_backward(batch: dict, updates: dict) -> torch.Tensor:
    """The gradient of the loss that the module would compute; weights of 0 must hide whatever stands there."""
    log_probs = torch.full(batch["response_mask"].shape, -1.0, requires_grad=True)
    loss = policy_loss(
        log_probs,
        log_probs.detach(),
        torch.nan_to_num(batch["rm_scores"], posinf=1, neginf=-1).clamp(-1, 1),
        updates["response_mask"],
        rollout_is_weights=updates["rollout_is_weights"],
    ).loss
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad.isfinite().all()
    return log_probs.grad


@over("selector", "reweighter")
@pytest.mark.parametrize("make", list(LIMITS.values()), ids=list(LIMITS))
@pytest.mark.filterwarnings("ignore:.*samples have no score", "ignore:k is 2", "ignore:.*alone in its group")
def test_law_5_no_surprise_numbers(scorer, kind, actuator, make):
    batch = make()
    decision = pipeline_of(scorer, kind, actuator).decide(batch)
    updates = decision.updates(RolloutBatch(batch))
    assert decision.weights.isfinite().all()
    assert (decision.weights >= 0).all()
    assert decision.weights.dtype == torch.float32
    assert {name for name, metric in decision.metrics.items() if not metric.isfinite()} == set()
    missing = decision.scores.isnan() if decision.scores.dim() == 1 else decision.scores.isnan().any(-1)
    assert not decision.keep[missing].any()
    gradient = finite_backward(batch, updates)
    assert not gradient[decision.weights == 0].any()


@over("selector")
def test_law_5_keeping_everything_changes_nothing(scorer, kind, actuator):
    batch = a_batch()
    if actuator == "bernoulli":  # which draws, and keeps a score of 1 alone for certain
        return
    if actuator == "limr":
        assert batch["limr_score"].min() > 0
    decision = pipeline_of(scorer, kind, actuator, **EVERYTHING[actuator]).decide(batch)
    updates = decision.updates(RolloutBatch(batch))
    assert torch.equal(updates["response_mask"], batch["response_mask"])
    assert torch.equal(updates["rollout_is_weights"], batch["response_mask"].float())
    assert "advantages" not in updates
    assert decision.metrics["kept_frac"] == 1


@over("selector", "reweighter")
@pytest.mark.filterwarnings("ignore:12 samples have no score")
def test_law_5_without_any_score_nothing_is_kept(scorer, kind, actuator):
    if scores_everything(scorer):
        return
    batch = filled(rm_scores=NAN, advantages=NAN, old_log_probs=NAN)
    decision = pipeline_of(scorer, kind, actuator).decide(batch)
    gradient = finite_backward(batch, decision.updates(RolloutBatch(batch)))
    assert decision.num_kept == 0
    assert not gradient.any()


@over("reweighter")
def test_law_5_equal_scores_weigh_alike(scorer, kind, actuator):
    if actuator in ("domain_weight", "length_debias", "pf_ppo"):  # by the domain, the length, the first of equals
        return
    batch = filled(rm_scores=0.75, advantages=-2.0, old_log_probs=-0.5, response_mask=1)
    decision = pipeline_of(scorer, kind, actuator).decide(batch)
    scale = 1.0 if built(kind, actuator).normalize != "none" else float(decision.weights[0, 0])
    torch.testing.assert_close(decision.weights, torch.full_like(decision.weights, scale))


TIES = {
    # Of 12 samples, a in 0, 3, 6, 9; b in 1, 4, 7, 10; c in 2, 5, 8, 11.
    "topk_fraction": ({"fraction": 0.25}, [0, 1, 2]),
    "gfpo": ({"k": 1}, [0, 1, 2]),
    "max_variance": ({"keep_fraction": 0.5}, [0, 1, 2, 3, 4, 5]),
    "cppo": ({"pruning_rate": 0.5}, [0, 1, 2, 3, 4, 5]),
    "nearest": ({"fraction": 0.25}, [0, 1, 2]),
    # A score of 1 is kept for certain, and of rewards that are all equal the variance is 0.
    "bernoulli": ({}, list(range(12))),
    "threshold_band": ({"low": -0.1, "high": 1.1}, list(range(12))),
    "online_difficulty_filter": ({}, []),
    "vcrl": ({}, []),
    "limr": ({}, list(range(12))),
    "nonzero_variance": ({}, []),
    "variance_top_k": ({"fraction": 0.3}, [0, 3, 6, 9]),
    "variance_top_p": ({"p": 0.3, "shares": "softmax"}, [0, 3, 6, 9]),
    "high_entropy_tokens": ({}, list(range(12))),
    "lopti": ({"part": "low"}, []),
    "all_of": ({"selectors": [HALF]}, [0, 1, 2, 3, 4, 5]),
    "any_of": ({"selectors": [HALF]}, [0, 1, 2, 3, 4, 5]),
    "not_": ({"selector": HALF}, [6, 7, 8, 9, 10, 11]),
}


@over("selector")
def test_law_6_of_equals_the_earliest_stay(scorer, kind, actuator):
    if actuator in ("dots", "selective_backprop"):  # which draw
        return
    params, expected = TIES[actuator]
    if actuator == "bernoulli" and scorer == "group_reward_variance":
        expected = []
    batch = filled(rm_scores=1.0, advantages=1.0, old_log_probs=0.0, response_mask=1)
    for _ in range(3):
        keep = pipeline_of(scorer, kind, actuator, **params).decide(batch).keep
        keep = keep if keep.dim() == 1 else keep.all(-1)
        assert keep.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("largest", [True, False])
def test_law_6_of_a_hundred_thousand_equals_the_earliest_stay(largest):
    scores = torch.tensor([0.5, 1.0, 0.0]).repeat_interleave(100_000)
    kept = build("selector", "topk_fraction", fraction=0.5, largest=largest).act(scores, {})
    best = range(100_000, 200_000) if largest else range(200_000, 300_000)
    assert kept == sorted([*best, *range(50_000)])


@over("reweighter")
@pytest.mark.parametrize("normalize", ["tokens", "samples", "abs_advantage"])
@given(seed=st.integers(0, 10_000), num_missing=st.integers(0, 11))
@settings(max_examples=3, deadline=None)
def test_law_7_weights_have_a_mean_of_one(scorer, kind, actuator, normalize, seed, num_missing):
    batch = a_batch(seed, tokens=7)
    sizes = batch["advantages"].abs().double().numpy()
    for name in FIELDS:
        batch[name][:num_missing] = NAN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = pipeline_of(scorer, kind, actuator, normalize=normalize).decide(batch).weights.double().numpy()
    valid = batch["response_mask"].bool().numpy()
    if not scores_everything(scorer):
        valid[:num_missing] = False
    rows = valid.any(1)
    assert not weights[~valid].any()
    sizes[:num_missing] = 0
    if normalize == "tokens" or not sizes.any():
        assert weights[valid].mean() == pytest.approx(1, abs=1e-6)
    elif normalize == "samples":
        assert (weights.sum(1) / valid.sum(1).clip(1))[rows].mean() == pytest.approx(1, abs=1e-6)
    elif (weights * sizes).any():
        assert (weights * sizes)[valid].sum() / sizes[valid].sum() == pytest.approx(1, abs=1e-6)


UNSCALED = {"advantage_reweight", "awr", "grpo_lead", "grpo_s", "gtpo", "mis", "odsw", "tis"}
BY_SAMPLE = {"length_debias", "rwr"}


def test_law_7_rules_that_do_not_scale_or_otherwise_are_those_of_papers():
    found = {name: built("reweighter", name).normalize for name in components("reweighter")}
    assert {name for name, normalize in found.items() if normalize == "none"} == UNSCALED
    assert {name for name, normalize in found.items() if normalize == "samples"} == BY_SAMPLE
    assert all(normalize == "tokens" for name, normalize in found.items() if name not in UNSCALED | BY_SAMPLE)
    rule = build("reweighter", "advantage_reweight", alpha=0.25)
    weights = Pipeline(build("scorer", "token_prob"), rule).decide(a_batch()).weights
    valid = weights[a_batch()["response_mask"] > 0]
    assert 0.75 < valid.min() < valid.max() < 1


@over("selector", "reweighter")
def test_law_9_a_decision_carries_no_gradient(scorer, kind, actuator):
    batch = a_batch()
    for name in FIELDS:
        batch[name].requires_grad_()
    batch["rollout_is_weights"] = torch.ones(12, 5, requires_grad=True)
    decision = pipeline_of(scorer, kind, actuator).decide(batch)
    updates = decision.updates(RolloutBatch(batch))
    made = [decision.scores, decision.weights, decision.advantages, *decision.metrics.values()]
    made += [updates["rollout_is_weights"], updates["response_mask"]]
    assert not any(value.requires_grad for value in made if value is not None)


@over("selector", "reweighter")
def test_law_9_the_parts_alone_carry_no_gradient_either(scorer, kind, actuator):
    batch = a_batch()
    scores = scorer_of(scorer).score(batch).requires_grad_()
    made = built(kind, actuator).act(scores, batch)
    assert not (isinstance(made, torch.Tensor) and made.requires_grad)
