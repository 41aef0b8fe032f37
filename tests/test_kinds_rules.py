"""Kinds of reported faults in what rules decide: over all components, against oracles of their own."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dataflex import Pipeline, RolloutBatch, components
from lightning_dataflex.functional.advantages import grpo_advantages, rloo_advantages
from tests.kinds import PAIRS, SEEDS, assert_decides, decided, few, select, some
from tests.laws import FIELDS, HALF, a_batch, built, scorer_of
from tests.ranks import taken

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:.*samples have no score", "ignore:.*alone in its", "ignore:k is")


@given(seed=SEEDS, gone=st.sets(st.integers(0, 11), min_size=1, max_size=8), how=st.sampled_from(["mask", "NaN"]))
@few
def test_kind_baseline_leak_what_is_left_out_moves_nobody(seed: int, gone: set[int], how: str) -> None:
    batch, left = a_batch(seed), [i for i in range(12) if i not in gone]
    without, other = taken(batch, left), dict(batch)
    index = torch.tensor(sorted(gone))
    rewards = batch["rm_scores"].index_fill(0, index, 1e6 if how == "mask" else NAN)
    other["rm_scores"] = rewards
    if how == "mask":
        other["response_mask"] = batch["response_mask"].index_fill(0, index, 0)
    for estimator in (grpo_advantages, rloo_advantages):
        read, rest = RolloutBatch(other), RolloutBatch(without)
        got = estimator(read.outcomes, read.group_ids)
        torch.testing.assert_close(got[left], estimator(rest.outcomes, rest.group_ids))
        assert not got[index].any()
    for pair in PAIRS:
        if how == "mask" or "rm_scores" in scorer_of(pair[0]).requires:
            assert_decides(pair, other, decided(pair, without), left)


@given(seed=SEEDS, more=st.sampled_from([[], [HALF], [{"scorer": "token_prob", "selector": "high_entropy_tokens"}]]))
@some
def test_kind_baseline_leak_a_subsets_advantages_are_of_what_is_kept_in_the_end(seed: int, more: list[Any]) -> None:
    batch, draw = a_batch(seed), np.random.default_rng(seed)
    for k, metric in ((2, "short"), (3, "short")):
        gfpo = {"name": "gfpo", "params": {"k": k, "metric": metric}}
        rule: Any = {"name": "all_of", "params": {"selectors": [gfpo, *more]}} if more else gfpo
        decision = select(batch, rule, "response_length")
        kept = decision.keep if decision.keep.dim() == 1 else decision.keep.any(-1)
        rewards = batch["rm_scores"].double().numpy()
        for name in set(batch["uid"]):
            inside = [i for i, u in enumerate(batch["uid"]) if u == name and kept[i]]
            values = rewards[inside]
            want = (values - values.mean()) / (values.std() + 1e-6) if len(inside) > 1 else 0 * values
            np.testing.assert_allclose(decision.advantages[inside], want, atol=1e-5)
        # Rewards of what is dropped are not read.
        moved = torch.where(kept, batch["rm_scores"], torch.tensor(draw.normal(size=12), dtype=torch.float32))
        again = select(batch | {"rm_scores": moved}, rule, "response_length")
        torch.testing.assert_close(again.advantages[kept], decision.advantages[kept])


REWARDED = [name for name in components("scorer") if "rm_scores" in built("scorer", name).requires]


@given(seed=SEEDS, scale=st.floats(0.5, 20), shift=st.floats(-5, 5))
@few
def test_kind_filter_semantics_the_signal_is_the_field_that_was_asked_for(
    seed: int, scale: float, shift: float
) -> None:
    batch = a_batch(seed)
    verdict = (batch["rm_scores"] > 0.5).float()
    apart = batch | {"verdict": verdict}
    for pair in PAIRS:
        if pair[0] in REWARDED:
            want = decided(pair, batch | {"rm_scores": verdict})
            got = decided(pair, apart, fields={"rm_scores": "verdict"})
            assert torch.equal(got.keep, want.keep), pair
            torch.testing.assert_close(got.weights, want.weights)
            assert "rm_scores" not in got.updates(RolloutBatch(apart))
    # Scaling by the batch makes no signal where there was none, and takes none away.
    scaled = apart | {"rm_scores": verdict * scale + shift}
    one, other = (select(each, "nonzero_variance") for each in (scaled, batch | {"rm_scores": verdict}))
    assert torch.equal(one.keep, other.keep)
    assert one.metrics["frac_zero_std"] == other.metrics["frac_zero_std"]


DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@given(seed=SEEDS)
@few
def test_kind_numeric_limits_half_and_double_decide_as_their_values_in_single_do(seed: int) -> None:
    batch = a_batch(seed)
    for pair, dtype in zip(PAIRS, itertools.cycle(DTYPES[seed % 3 :] + DTYPES)):
        cast = {n: v.to(dtype) if n in FIELDS else v for n, v in batch.items()}
        single = {n: v.float() if n in FIELDS else v for n, v in cast.items()}
        want, got = decided(pair, single), decided(pair, cast)
        assert got.weights.dtype == torch.float32
        assert torch.equal(got.keep, want.keep), (pair, dtype)
        # In single precision the estimate of a small KL has three digits.
        near = 1e-3 if dtype == torch.float64 else 1e-6
        assert torch.allclose(got.weights, want.weights, rtol=near, atol=near), (pair, dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_kind_numeric_limits_rewards_may_be_whole_numbers(dtype: torch.dtype) -> None:
    batch = a_batch(1)
    whole = (batch["rm_scores"] > 0.5).to(dtype)
    for pair in PAIRS:
        if pair[0] in REWARDED:
            assert_decides(pair, batch | {"rm_scores": whole}, decided(pair, batch | {"rm_scores": whole.float()}))


@given(seed=SEEDS, drop=st.sampled_from(["mask", "weight"]))
@few
def test_kind_callback_lifecycle_a_second_decision_on_a_batch_is_the_first(seed: int, drop: Any) -> None:
    batch = a_batch(seed)
    for scorer, kind, actuator in PAIRS:
        rule = built(kind, actuator)
        if rule.remembers or scorer_of(scorer).remembers:
            continue
        pipeline, fresh = Pipeline(scorer_of(scorer), rule), RolloutBatch(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first = pipeline.decide(batch)
            once = RolloutBatch(fresh.replaced(first.updates(fresh, drop=drop)))
            second = pipeline.decide(once)
        assert torch.equal(first.keep, second.keep), actuator
        assert torch.equal(first.weights, second.weights), actuator
        assert {k: float(v) for k, v in first.metrics.items()} == {k: float(v) for k, v in second.metrics.items()}
