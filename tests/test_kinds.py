"""Kinds of reported faults in what is read of a batch: over all components, against oracles of their own."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dataflex import Pipeline, RolloutBatch, Selector, build
from lightning_dataflex.functional.advantages import grpo_advantages, rloo_advantages
from lightning_dataflex.functional.loss import policy_loss
from tests.kinds import PAIRS, SEEDS, assert_decides, decided, few, rows, select, some
from tests.laws import FIELDS, PER_TOKEN, a_batch, built, scorer_of, scores_everything
from tests.ranks import taken

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:.*samples have no score", "ignore:.*alone in its")


PARTS = st.lists(st.integers(-9, 9), min_size=3, max_size=3)


@given(
    groups=st.lists(st.lists(PARTS, min_size=1, max_size=5), min_size=1, max_size=4),
    scales=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
@example(groups=[[[7, 4, 1]], [[3, 1, 2], [2, 1, 3]]], scales=[0, 0, 4])
@some
def test_kind_degenerate_group_totals_that_are_equal_but_for_rounding_are_equal(groups: Any, scales: Any) -> None:
    groups = [[[Fraction(part, 10) * 10**n for part, n in zip(parts, scales)] for parts in group] for group in groups]
    groups = [[*group, group[0][::-1], group[0][1:] + group[0][:1]] for group in groups]  # in another order
    tenths = [part for group in groups for parts in group for part in parts]
    tokens = torch.tensor([float(each) for each in tenths]).reshape(-1, 3)
    uid = [f"g{i}" for i, group in enumerate(groups) for _ in group]
    totals = [sum(tenths[i : i + 3]) for i in range(0, len(tenths), 3)]
    mixed = [len({t for t, u in zip(totals, uid) if u == name}) > 1 for name in uid]
    batch = RolloutBatch(rows(tokens, uid, [3] * len(uid)))
    for scores in (grpo_advantages(batch.outcomes, batch.group_ids), rloo_advantages(batch.outcomes, batch.group_ids)):
        assert scores.isfinite().all()
        assert not scores[~torch.tensor(mixed)].any()
    sizes = torch.tensor([float(uid.count(name)) for name in uid])
    bound = (sizes - 1) / sizes.sqrt() + 1e-5
    assert (grpo_advantages(batch.outcomes, batch.group_ids).abs() <= bound).all()
    assert select(batch.source, "nonzero_variance").keep.tolist() == mixed
    quiet = {name for name, each in zip(uid, mixed) if not each}
    assert float(select(batch.source, "topk_fraction").metrics["frac_zero_std"]) == pytest.approx(
        len(quiet) / len(groups)
    )
    for scorer in ("group_variance", "group_std", "group_reward_variance"):
        assert not build("scorer", scorer).score(batch)[~torch.tensor(mixed)].any()


RATES = {"easy": [1.0] * 4, "hard": [0.0] * 4, "lost": [NAN] * 4, "mixed": [1.0, 0, 0, 1], "part": [NAN, 1.0, NAN, 0]}


@given(kinds=st.lists(st.sampled_from(list(RATES)), min_size=1, max_size=6))
@some
def test_kind_all_filtered_every_rule_on_signal_keeps_the_groups_that_have_one(kinds: list[str]) -> None:
    rewards = torch.tensor([reward for kind in kinds for reward in RATES[kind]])
    batch = rows(rewards, [f"g{i}" for i in range(len(kinds)) for _ in range(4)])
    known = ~rewards.isnan()
    want = known & torch.tensor([kind in ("mixed", "part") for kind in kinds for _ in range(4)])
    for scorer, rule in (
        ("outcome", "nonzero_variance"),
        ("group_solve_rate", "threshold_band"),
        ("group_reward_variance", {"name": "threshold_band", "params": {"low": 0.0, "high": 2.0}}),
        ("group_reward_variance", {"name": "vcrl", "params": {"kappa": 0.5}}),
    ):
        decision = select(batch, rule, scorer)
        assert torch.equal(decision.keep, want)
        pipeline = Pipeline.from_config({"mechanism": "select", "scorer": scorer, "actuator": rule})
        instead = pipeline.decide(batch, keep_all_if_empty=True)
        assert torch.equal(instead.keep, want if want.any() else known)
        log_probs = torch.zeros(len(rewards), 1, requires_grad=True)
        updates = decision.updates(RolloutBatch(batch))
        weights = updates["rollout_is_weights"]
        policy_loss(
            log_probs, log_probs.detach(), rewards, updates["response_mask"], rollout_is_weights=weights
        ).loss.backward()
        assert torch.equal(log_probs.grad[:, 0] != 0, want & (rewards != 0))


@given(seed=SEEDS, row=st.integers(0, 11))
@few
def test_kind_nonfinite_one_nan_anywhere_leaves_out_its_sample_alone(seed: int, row: int) -> None:
    batch = a_batch(seed)
    others = [i for i in range(12) if i != row]
    # Another field for each pair, and at the next seed another one again.
    for pair, name in zip(PAIRS, itertools.cycle(FIELDS[seed % len(FIELDS) :] + FIELDS)):
        scorer, kind, actuator = pair
        rule = built(kind, actuator)
        value = batch[name].clone()
        value[(row, 0) if value.dim() == 2 else row] = NAN
        dirty = batch | {name: value}
        if name not in {*scorer_of(scorer).requires, *rule.requires}:
            assert_decides(pair, dirty, decided(pair, batch))
        elif not (scores_everything(scorer) and rule.screened == ()):
            decision = decided(pair, dirty)
            assert not decision.weights[row].any(), (pair, name)
            # What is made of several rules asks each of them about the samples that this one can judge.
            if scorer_of(scorer).screened != () and rule.screened != ():
                assert_decides(pair, dirty, decided(pair, taken(batch, others)), others)


def dressed(value: torch.Tensor, kind: str) -> Any:
    return {"array": lambda: value.numpy(), "list": value.tolist, "half": lambda: value.half()}[kind]()


@given(
    seed=SEEDS, kind=st.sampled_from(["array", "list"]), dtype=st.sampled_from([torch.bool, torch.uint8, torch.float32])
)
@few
def test_kind_mask_padding_no_container_and_no_type_of_mask_lets_padding_through(
    seed: int, kind: str, dtype: Any
) -> None:
    batch = a_batch(seed)
    mask = batch["response_mask"]
    dirty = {name: torch.where(mask > 0, batch[name], NAN) for name in PER_TOKEN}
    other = batch | {name: dressed(value, kind) for name, value in dirty.items()} | {"response_mask": mask.to(dtype)}
    for pair in PAIRS:
        assert_decides(pair, other, decided(pair, batch))


class Sum(Selector):
    """Plain code that trusts its batch to have no padding."""

    requires = ("tokens",)

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        return np.asarray(batch.non_tensor_batch["tokens"]).sum(1) > 10


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float64])
def test_kind_mask_padding_whole_numbers_too_are_0_in_padding(dtype: torch.dtype) -> None:
    batch = {"tokens": torch.tensor([[6, 99], [6, 6]], dtype=dtype), "response_mask": torch.tensor([[1, 0], [1, 1]])}
    for given_as in (batch, batch | {"tokens": batch["tokens"].numpy()}):
        assert Sum().keep(torch.zeros(2), given_as).tolist() == [False, True]


IDS = [7, -3, "7", "a", ("a", 1), ("a", "1"), b"a", 2.5, frozenset("ab"), np.int64(11), np.str_("b"), 2**70]


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from([0.0, 0.25, 1.0])), min_size=2, max_size=14))
@example([(0, 1.0), (2, 0.0), (4, 1.0), (5, 0.0)])
@some
def test_kind_grouping_ids_of_any_type_in_any_order_group_as_a_dictionary_does(samples: Any) -> None:
    uid = [IDS[i] for i, _ in samples]
    rewards = [reward for _, reward in samples]
    places: dict[Any, list[int]] = {}
    for place, name in enumerate(uid):
        places.setdefault(name, []).append(place)
    groups = [np.array([rewards[i] for i in places[name]]) for name in uid]
    objects = np.empty(len(uid), dtype=object)
    objects[:] = uid
    whole = {name: i for i, name in enumerate(places)}
    for given_as in (uid, tuple(uid), objects, torch.tensor([whole[name] for name in uid])):
        batch = rows(torch.tensor(rewards), given_as)
        rates, spread = (build("scorer", name).score(batch) for name in ("group_solve_rate", "group_variance"))
        np.testing.assert_allclose(rates, [(group > 0.5).mean() for group in groups], atol=1e-6)
        np.testing.assert_allclose(spread, [group.var() for group in groups], atol=1e-6)
        centred = grpo_advantages(batch["rm_scores"], RolloutBatch(batch).group_ids, scale=False)
        np.testing.assert_allclose(centred, [r - group.mean() for r, group in zip(rewards, groups)], atol=1e-6)
