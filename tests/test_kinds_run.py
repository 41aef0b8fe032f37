"""Kinds of reported faults in ranks, samplers, mixtures and resumed runs: generated, against oracles of their own."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex import DataFlexCallback, DomainMixtureSampler, Mixture, Pipeline, build, components
from lightning_dataflex.core.domains import DomainStats, DomainSums
from lightning_dataflex.functional.proportions import floored
from tests.laws import PER_TOKEN, a_batch, built, pairs, scorer_of
from tests.ranks import processes, spread
from tests.test_mixers import LEAST, NAMES, mixer_of
from tests.toy import Toy, fit, rollout

NAN = float("nan")
some = settings(max_examples=25, deadline=None, derandomize=True)
SHARES = st.lists(st.integers(0, 20), min_size=2, max_size=4).filter(any)

# -- ranks -------------------------------------------------------------------------------------------------------------


def decided(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two rules on tokens and one on groups say of each of these batches."""
    rules = [
        ("token_entropy", "high_entropy_tokens", {"fraction": 0.5}),
        ("outcome", "topk_fraction", {"fraction": 0.5}),
        ("outcome", "nonzero_variance", {}),
    ]
    said = []
    for batch, (scorer, selector, params) in itertools.product(parts, rules):
        decision = Pipeline(build("scorer", scorer), build("selector", selector, **params)).decide(batch)
        metrics = {name: float(value) for name, value in decision.metrics.items()}
        said.append({"keep": decision.keep, "metrics": metrics})
    return said


def test_kind_ddp_collectives_ranks_of_any_sizes_decide_and_log_as_one() -> None:
    draw, batches, rows_of = np.random.default_rng(0), [a_batch(seed) for seed in range(6)], []
    for seed in range(6):
        order = draw.permutation(12).tolist()
        cut = [0, 12, *draw.integers(1, 12, 4).tolist()][seed]
        rows_of.append([order[:cut], order[cut:]])
    wide = ("response_mask", *PER_TOKEN)
    parts = [spread(batch, rows, wide) for batch, rows in zip(batches, rows_of)]
    first, second = processes(2).run(decided, [[part[rank] for part in parts] for rank in range(2)])
    whole = [spread(batch, [rows[0] + rows[1]], wide)[0] for batch, rows in zip(batches, rows_of)]
    alone = decided(whole)
    for one, other, want, rows in zip(first, second, alone, np.repeat(np.arange(6), 3)):
        for got, here in ((one, slice(0, len(rows_of[rows][0]))), (other, slice(len(rows_of[rows][0]), 12))):
            keep = want["keep"][here]
            assert torch.equal(got["keep"], keep if keep.dim() == 1 else keep[:, : got["keep"].shape[1]])
        assert list(one["metrics"]) == list(other["metrics"]) == list(want["metrics"])
        assert one["metrics"] == other["metrics"] == pytest.approx(want["metrics"], abs=1e-6)
    # The quantile is that of the tokens of all ranks.
    for batch, want in zip(whole, alone[::3]):
        valid = batch["response_mask"].numpy() > 0
        entropies = batch["entropies"].double().numpy()
        np.testing.assert_array_equal(want["keep"], valid & (entropies >= np.quantile(entropies[valid], 0.5)))


@given(
    world=st.integers(1, 4), size=st.integers(1, 3), shares=SHARES, more=st.integers(0, 25), kind=st.sampled_from(
        [{}, {"replacement": False}, {"draw": "multinomial"}]
    ),
)  # fmt: skip
@some
@pytest.mark.filterwarnings("ignore:The domains")
def test_kind_sampler_ddp_ranks_deal_out_one_stream_of_equal_parts(
    world: int, size: int, shares: list[int], more: int, kind: dict[str, Any]
) -> None:
    labels = [f"d{i % len(shares)}" for i in range(len(shares) + world * size + more)]
    proportions = [share / sum(shares) for share in shares]

    def drawn(**ranks: Any) -> tuple[list[list[int]], int]:
        sampler = DomainMixtureSampler(labels, proportions=proportions, seed=3, **kind, **ranks)
        epochs = []
        for epoch in range(2):
            epochs.append([])
            for i, row in enumerate(sampler):
                epochs[-1].append(row)
                if epoch == 0 and i == ranks["batch_size"] - 1:
                    sampler.set_proportions(dict(zip(sampler.domains, proportions[::-1])))
        return epochs, len(sampler)

    ranks = [drawn(batch_size=size, num_replicas=world, rank=rank)[0] for rank in range(world)]
    for epoch in range(2):
        lengths = {len(rank[epoch]) for rank in ranks}
        assert len(lengths) == 1
        if kind.get("replacement", True):
            assert lengths == {len(labels) // world}
        dealt = [row for rank in ranks for row in rank[epoch]]
        if not kind.get("replacement", True):
            assert len(set(dealt)) == len(dealt)
    assert [drawn(batch_size=size, num_replicas=world, rank=rank)[0] for rank in range(world)] == ranks


# -- mixtures ----------------------------------------------------------------------------------------------------------


@given(weights=SHARES, part=st.floats(0, 1), method=st.sampled_from(["water_filling", "mixture"]))
@some
def test_kind_mixer_proportions_the_floor_holds_after_every_normalisation(
    weights: Any, part: float, method: Any
) -> None:
    p = np.array(weights) / sum(weights)
    floor = part / len(p)
    got = floored(torch.tensor(p, dtype=torch.float32), floor, method).numpy()
    assert got.dtype == np.float64
    assert abs(got.sum() - 1) < 1e-6
    assert (got >= floor - 1e-9).all()
    if method == "water_filling":
        # The factor on those above the floor, by bisection.
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.maximum(floor, middle * p).sum() < 1 else (low, middle)
        np.testing.assert_allclose(got, np.maximum(floor, high * p), atol=1e-6)


EXTREME = st.sampled_from([NAN, 0.0, -1.0, 1.0, 1e-30, 1e9, -1e9, 1e30])


@pytest.mark.parametrize("name", NAMES)
@given(steps=st.lists(st.lists(EXTREME, min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None, derandomize=True)
@pytest.mark.filterwarnings("ignore")
def test_kind_mixer_proportions_no_scores_take_a_domain_out_or_break_the_sum(name: str, steps: Any) -> None:
    mixer, shares = mixer_of(name), torch.full((3,), 1 / 3, dtype=torch.float64)
    stats = DomainStats(mixer.domains, mixer.window)
    sampler = DomainMixtureSampler(list("abc") * 4, 4)
    for step, scores in enumerate(steps):
        sums = DomainSums.of(torch.tensor(scores), torch.arange(3), 3)
        stats.add(step, sums)
        mixer.observe(sums, shares)
        shares = mixer.proportions(stats, step_id=step + 1, progress=0.5)
        assert shares.isfinite().all()
        assert abs(float(shares.sum()) - 1) < 1e-12
        assert (shares >= LEAST.get(name, 0.0) - 1e-12).all()
        sampler.set_proportions(shares.tolist())
        assert abs(sum(sampler.proportions.values()) - 1) < 1e-12


@given(shares=SHARES, sizes=st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(sum), draw=st.booleans())
@some
@pytest.mark.filterwarnings("ignore:The domains")
def test_kind_mixer_proportions_an_epoch_ends_and_draws_no_domain_of_share_zero(
    shares: list[int], sizes: list[int], draw: bool
) -> None:
    names = "abcd"[: len(shares)]
    labels = [name for name, size in zip(names, sizes) for _ in range(size)]
    there = {name for name, share in zip(names, shares) if share and name in labels}
    if not there:
        return
    proportions = {name: share / sum(shares) for name, share in zip(names, shares)}
    sampler = DomainMixtureSampler(labels, 3, proportions=proportions, domains=names, replacement=draw)
    rows = list(itertools.islice(sampler, 1000))
    assert len(rows) == len(sampler) == (len(labels) if draw else sum(labels.count(name) for name in there))
    assert {labels[row] for row in rows} <= there
    if not draw:
        assert Counter(rows).most_common(1)[0][1] == 1


# -- stop and resume ---------------------------------------------------------------------------------------------------


@given(before=st.permutations("abcd"), after=st.permutations("bcde"), num=st.integers(2, 4), steps=st.integers(1, 5))
@some
def test_kind_resume_state_what_is_known_of_a_domain_is_found_by_its_name(
    before: Any, after: Any, num: int, steps: int
) -> None:
    def mixture(domains: Any) -> Mixture:
        return Mixture.from_config({"mechanism": "mix", "actuator": "reward_gap", "domains": list(domains)})

    first, then = before[:num], after[:num]
    saved = mixture(first)
    for step in range(steps):
        rewards = torch.tensor([ord(name) / 100 for name in first])
        saved.observe({"rm_scores": rewards, "domain": list(first), "response_mask": torch.ones(num, 1)})
        saved.end_step(step)
    loaded = mixture(then)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded.load_state_dict(saved.state_dict())
    assert loaded.stats.scores() == pytest.approx({name: ord(name) / 100 for name in then if name in first})
    assert any("The checkpoint has the domains" in str(each.message) for each in said) == ({*first} != {*then})
    assert sum(loaded.proportions.values()) == pytest.approx(1)
    if {*first} == {*then}:
        assert loaded.proportions == saved.proportions


def test_kind_resume_state_callbacks_of_other_parts_have_other_keys_and_equal_ones_are_refused() -> None:
    found = {}
    for scorer, kind, actuator in [parameter.values for parameter in pairs("selector", "reweighter")]:
        if components(kind)[actuator].default_scorer == scorer:
            mechanism: Any = {"selector": "select", "reweighter": "reweight"}[kind]
            callback = DataFlexCallback(mechanism, scorer_of(scorer), built(kind, actuator))
            found[scorer, actuator] = callback.state_key
    assert len(set(found.values())) == len(found) > 10
    halves = [{"name": "topk_fraction", "params": {"fraction": share}} for share in (0.5, 0.25)]
    with pytest.raises((RuntimeError, ValueError), match=r"state_key|label"):
        fit(Toy(), [DataFlexCallback("select", "outcome", half) for half in halves], [rollout(0)])
    named = [DataFlexCallback("select", "outcome", half, label=f"part {i}") for i, half in enumerate(halves)]
    fit(Toy(), named, [rollout(0)])
    assert [callback.state_key for callback in named] == ["DataFlexCallback[part 0]", "DataFlexCallback[part 1]"]


@given(stop=st.integers(1, 19), size=st.integers(1, 4), ahead=st.integers(0, 3), epochs=st.integers(0, 1))
@some
def test_kind_resume_state_a_sampler_goes_on_from_anywhere(
    tmp_path_factory: Any, stop: int, size: int, ahead: int, epochs: int
) -> None:
    labels = list("aaabbc") * 4

    def made() -> DomainMixtureSampler:
        return DomainMixtureSampler(labels, size, proportions=[0.2, 0.3, 0.5], seed=1)

    whole, stopped, resumed = made(), made(), made()
    expected = [list(whole) for _ in range(3)]
    for _ in range(epochs):
        list(stopped)
    num = min(stop, -(-len(labels) // size))
    list(itertools.islice(stopped, (num + ahead) * size))
    path: Path = tmp_path_factory.mktemp("state") / "sampler.pt"
    torch.save(stopped.state_dict(num), path)
    resumed.load_state_dict(torch.load(path, weights_only=True))
    rest = expected[epochs][num * size :]
    if rest:
        assert list(resumed) == rest
    assert list(resumed) == expected[epochs + 1]
