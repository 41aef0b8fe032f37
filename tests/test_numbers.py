"""Numbers at their limits: half precision, many tokens, far policies, groups of one and of ten thousand."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dataflex import Pipeline, build, components
from lightning_dataflex.core.history import PromptHistory
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.functional.loss import policy_loss, token_kl
from lightning_dataflex.functional.selection import top_tokens
from lightning_dataflex.functional.weighting import quantile_band
from tests import oracles
from tests.laws import a_batch, built, over, pairs, pipeline_of, scorer_of

FAR = 1e4


def test_every_rule_has_an_oracle():
    named = set(oracles.SCORES) | {"greso", "mopps", "pass_rate_band"}
    assert named >= set(components("scorer"))
    assert {*oracles.KEEPS, *oracles.DRAWS} == set(components("selector"))
    assert set(oracles.WEIGHTS) == set(components("reweighter"))


# -- half precision ----------------------------------------------------------------------------------------------------


def cast(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    floats = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return batch | {name: value.to(dtype) for name, value in floats.items()}


@over("selector", "reweighter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_half_batch_has_the_scores_and_weights_of_its_numbers_in_float32(scorer, kind, actuator, dtype):
    half = cast(a_batch(), dtype)
    both = (half, cast(half, torch.float32))
    given, expected = (pipeline_of(scorer, kind, actuator).decide(batch, 4, progress=0.6) for batch in both)
    assert given.scores.dtype in (torch.float32, torch.float64)
    assert torch.equal(given.scores.nan_to_num(7.0), expected.scores.nan_to_num(7.0))
    assert torch.equal(given.weights, expected.weights)
    assert given.weights.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_rewards_of_a_long_response_are_added_up_exactly(dtype):
    mask = torch.ones(2, 6007)
    batch = {"rm_scores": torch.full((2, 6007), 0.25, dtype=dtype), "response_mask": mask, "uid": [7, 8]}
    batch["old_log_probs"] = batch["entropies"] = batch["advantages"] = batch["rm_scores"]
    for name in ("outcome", "sequence_logprob"):
        assert build("scorer", name).score(batch).tolist() == [6007 / 4] * 2
    for name in ("sequence_entropy", "advantage_magnitude", "advantage"):
        assert build("scorer", name).score(batch).tolist() == [0.25] * 2


# -- more than 2^24 tokens ---------------------------------------------------------------------------------------------

MANY = 2**24 + 1000


def test_quantiles_of_more_values_than_torch_takes():
    """Whole numbers in another order: the quantile at q is q of the way from the first to the last."""
    values = ((torch.arange(MANY) * 5_000_011) % MANY - MANY // 2).float()
    assert math.gcd(5_000_011, MANY) == 1
    kept = top_tokens(values.view(-1, 8), torch.ones(MANY // 8, 8), 0.2)
    assert int(kept.sum()) == MANY - math.ceil(0.8 * (MANY - 1))
    assert float(values.view(-1, 8)[kept].min()) == math.ceil(0.8 * (MANY - 1)) - MANY // 2
    band = quantile_band(values, 0.25, 0.75, 2.0)
    assert int((band == 2).sum()) == math.floor(0.75 * (MANY - 1)) - math.ceil(0.25 * (MANY - 1)) + 1


# -- policies far apart ------------------------------------------------------------------------------------------------


def far_batch() -> dict[str, Any]:
    old = torch.tensor([[FAR, -FAR, 0.0], [-FAR, -FAR, -FAR]])
    others = {name: torch.zeros(2, 3) for name in ("ref_log_probs", "rollout_log_probs", "teacher_log_probs")}
    return others | {"old_log_probs": old, "response_mask": torch.ones(2, 3), "uid": [7, 7]}


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("importance_ratio", {}, np.exp([[20, -20, 0], [-20, -20, -20]])),
        ("importance_ratio", {"level": "sequence"}, np.exp([0, -20])),
        ("importance_ratio", {"level": "geometric"}, np.exp([0, -20])),
        ("ref_kl", {"estimator": "k1"}, [[FAR, -FAR, 0], [-FAR] * 3]),
        ("ref_kl", {"estimator": "k2"}, [[FAR**2 / 2, FAR**2 / 2, 0], [FAR**2 / 2] * 3]),
        ("ref_kl", {}, [[FAR - 1, np.exp(20) - 21, 0], [np.exp(20) - 21] * 3]),
        ("ref_kl", {"level": "mean"}, [(FAR - 1 + np.exp(20) - 21) / 3, np.exp(20) - 21]),
        ("distill_gap", {"level": "sequence"}, [0, 3 * FAR]),
    ],
)
def test_scores_of_policies_far_apart_are_finite_and_clamped_as_documented(name, params, expected):
    np.testing.assert_allclose(build("scorer", name, **params).score(far_batch()), expected, rtol=1e-6)


@pytest.mark.parametrize("actuator", ["tis", "mis"])
def test_importance_weights_of_policies_far_apart_are_finite(actuator):
    weights = Pipeline(build("scorer", "importance_ratio"), build("reweighter", actuator)).decide(far_batch()).weights
    caught = {"tis": [[2, np.exp(-20), 1]], "mis": [[0, 0, 1]]}[actuator]
    np.testing.assert_allclose(weights[:1], caught, rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_and_its_gradient_are_finite_however_far_apart_the_policies_are(estimator, advantage, dtype):
    log_probs = torch.tensor([[-FAR, FAR, 0.0, -21.0]], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, 4, dtype=dtype)
    settings = {"ref_log_probs": zero, "kl_coef": 0.1, "kl_estimator": estimator}
    loss = policy_loss(log_probs, zero, torch.tensor([advantage]), torch.ones(1, 4), **settings).loss
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad.isfinite().all()


def test_no_gradient_of_a_kl_estimate_leads_away_from_the_reference():
    ratios = torch.tensor([-FAR, -21.0, -19.0, -1.0, 0.0, 1.0, FAR], requires_grad=True)
    values = token_kl(ratios)
    values.sum().backward()
    assert (values >= 0).all()
    assert (ratios.grad * ratios.detach() >= 0).all()
    assert token_kl(torch.tensor([-torch.inf])).isfinite().all()


# -- groups of one and of ten thousand ---------------------------------------------------------------------------------


def large_batch(num: int) -> tuple[dict[str, Any], oracles.Table]:
    """One group of `num` samples with another of one in its middle, and the same numbers for the oracles."""
    draw = np.random.default_rng(7)
    rows, tokens = num + 1, 3
    mask = np.arange(tokens) < draw.integers(1, tokens + 1, rows)[:, None]
    table: oracles.Table = {"mask": mask, "group": np.where(np.arange(rows) == num // 2, 1, 0)}
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"):
        table[name] = np.log(draw.uniform(0.05, 1, (rows, tokens)))
    table |= {"entropies": draw.uniform(0.1, 3, (rows, tokens)), "advantages": draw.normal(size=(rows, tokens))}
    table |= {name: draw.uniform(size=rows) for name in ("rm_scores", "difficulty", "limr_score")}
    table["rollout_step"] = draw.integers(0, 3, rows).astype(float)
    table["domain"] = draw.choice(["math", "code", "x"], rows)
    table = {k: v.astype(np.float32).astype(float) if v.dtype == float else v for k, v in table.items()}
    batch = {k: torch.tensor(v, dtype=torch.float32) for k, v in table.items() if v.dtype == float}
    batch |= {"response_mask": torch.tensor(mask), "uid": table["group"], "domain": table["domain"].tolist()}
    return batch, table


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that anything computes."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.size = max([self.size, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


BATCHES = {num: large_batch(num) for num in (1, 10_000)}


@pytest.mark.parametrize("num", list(BATCHES))
@pytest.mark.parametrize("name", [name for name in components("scorer") if name in oracles.SCORES])
def test_scores_of_groups_of_one_and_of_ten_thousand(name, num):
    batch, table = BATCHES[num]
    with warnings.catch_warnings(), Largest() as largest:
        warnings.simplefilter("ignore")
        scores = built("scorer", name).score(batch, step_id=3)
    np.testing.assert_allclose(scores, oracles.SCORES[name](table), rtol=1e-5, atol=1e-6)
    assert largest.size <= 16 * 3 * (num + 1)


@pytest.mark.parametrize("num", list(BATCHES))
@pytest.mark.parametrize(("scorer", "kind", "actuator"), [pair.values for pair in pairs("selector", "reweighter")])
def test_actions_on_groups_of_one_and_of_ten_thousand(scorer, kind, actuator, num):
    batch, table = BATCHES[num]
    pipeline = Pipeline(scorer_of(scorer), built(kind, actuator))
    tracemalloc.start()
    with warnings.catch_warnings(), Largest() as largest:
        warnings.simplefilter("ignore")
        decision = pipeline.decide(batch, 3, progress=0.6)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest.size <= 16 * 3 * (num + 1)
    assert most_bytes <= 1000 * (num + 100)
    scores = oracles.SCORES[registered_name(scorer_of(scorer)) if not scorer.startswith("of ") else scorer](table)
    if kind == "reweighter":
        expected = oracles.scaled(oracles.WEIGHTS[actuator](scores, table), table, pipeline.actuator.normalize)
        np.testing.assert_allclose(decision.weights, expected, rtol=1e-5, atol=1e-6)
    elif actuator in oracles.KEEPS:
        np.testing.assert_array_equal(decision.keep, oracles.KEEPS[actuator](scores, table))
    else:
        assert decision.weights.isfinite().all()


def test_a_history_counts_more_steps_than_int32_holds():
    history = PromptHistory({"num": 0.0}, max_prompts=2)
    for prompt, step in ((7, 2**31 + 5), (8, 2**40), (9, 2**40 + 1)):
        history.put(torch.tensor([prompt]), {"num": torch.tensor([1.0])}, step)
    again = PromptHistory({"num": 0.0}, max_prompts=2)
    again.load_state_dict(history.state_dict())
    assert again.seen(torch.tensor([7, 8, 9])).tolist() == [False, True, True]
