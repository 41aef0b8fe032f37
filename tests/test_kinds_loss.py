"""Kinds of reported faults in weights, losses and the rows of a batch: generated, against oracles of their own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.rlhf.batches import micro_batches, minibatches, num_micro_batches, sliced
from lightning_dataflex import Pipeline, RolloutBatch, build, components
from lightning_dataflex.core.domains import DomainStats, DomainSums
from lightning_dataflex.core.samples import Layout, compacted, taken
from lightning_dataflex.core.summary import merged
from lightning_dataflex.functional.loss import loss_denominator, policy_loss
from tests.core.test_samples import BATCHES
from tests.laws import a_batch, built, scorer_of

NAN = float("nan")
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
SEEDS = st.integers(0, 10_000)
some = settings(max_examples=30, deadline=None, derandomize=True)


def tables(seed: int) -> dict[str, torch.Tensor]:
    """Some rows blank, some weights 0, NaN wherever nothing is to be read."""
    draw = np.random.default_rng(seed)
    mask = draw.random((6, 4)) < 0.6
    mask[draw.integers(6)] = False
    weights = np.where(draw.random((6, 1)) < 0.4, 0.0, draw.uniform(0.2, 2, (6, 4)))
    out = {name: np.where(mask, draw.normal(-1, 0.3, (6, 4)), NAN) for name in ("new", "old", "ref", "advantages")}
    out |= {"entropies": np.where(mask, draw.uniform(0, 2, (6, 4)), NAN), "mask": mask, "weights": weights}
    return {name: torch.tensor(value) for name, value in out.items()}


def loss_of(x: dict[str, torch.Tensor], aggregation: Any, **more: Any) -> tuple[float, np.ndarray]:
    new, entropies = x["new"].clone().requires_grad_(), x["entropies"].clone().requires_grad_()
    loss = policy_loss(
        new, x["old"], x["advantages"], x["mask"], rollout_is_weights=x["weights"], aggregation=aggregation,
        ref_log_probs=x["ref"], kl_coef=0.1, entropies=entropies, entropy_coef=0.01, **more,
    ).loss  # fmt: skip
    loss.backward()
    return float(loss.detach()), np.concatenate([new.grad.numpy(), entropies.grad.numpy()], 1)


def by_hand(x: dict[str, torch.Tensor], aggregation: str) -> float:
    """In a loop over tokens."""
    v = {name: value.numpy() for name, value in x.items()}
    total, sequences, tokens = 0.0, 0, 0
    for i in range(len(v["mask"])):
        length = v["mask"][i].sum()
        sequences, tokens = sequences + (length > 0), tokens + length
        for t in np.flatnonzero(v["mask"][i]):
            ratio, a = np.exp(v["new"][i, t] - v["old"][i, t]), v["advantages"][i, t]
            term = max(-a * ratio, -a * np.clip(ratio, 0.8, 1.2)) * v["weights"][i, t]
            r = v["new"][i, t] - v["ref"][i, t]
            term += 0.1 * (np.exp(-r) - 1 + r) - 0.01 * v["entropies"][i, t]
            total += term / (length if aggregation == "seq-mean-token-mean" else 1)
    return total / max(tokens if aggregation == "token-mean" else sequences, 1)


@given(seed=SEEDS, cuts=st.lists(st.integers(0, 6), max_size=3), aggregation=st.sampled_from(AGGREGATIONS))
@some
def test_kind_loss_normalisation_one_denominator_whatever_is_masked_and_cut(
    seed: int, cuts: list[int], aggregation: Any
) -> None:
    x = tables(seed)
    loss, gradient = loss_of(x, aggregation)
    assert loss == pytest.approx(by_hand(x, aggregation), abs=1e-6)
    assert np.isfinite(gradient).all()
    denominator = loss_denominator(x["mask"], aggregation)
    borders = [0, *sorted(cuts), 6]
    pieces = [{k: v[a:b] for k, v in x.items()} for a, b in itertools.pairwise(borders)]
    parts = [loss_of(piece, aggregation, denominator=denominator) for piece in pieces]
    assert sum(part for part, _ in parts) == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(np.concatenate([part for _, part in parts]), gradient, atol=1e-6)
    # What is dropped by the mask is as if it were not there.
    kept = x["mask"].any(1) & (x["weights"][:, 0] > 0)
    alone = {name: value[kept] for name, value in x.items()}
    dropped = loss_of(x | {"mask": x["mask"] & kept[:, None]}, aggregation)
    assert dropped[0] == pytest.approx(by_hand(alone, aggregation), abs=1e-6)
    assert not dropped[1][~kept].any()


REWEIGHTERS = list(components("reweighter"))
MEANS = {
    "sequence_logprob": "mean", "sequence_entropy": "mean", "ref_kl": "mean", "importance_ratio": "geometric",
    "distill_gap": "mean", "advantage_magnitude": None,
}  # fmt: skip


@given(seed=SEEDS)
@settings(max_examples=3, deadline=None, derandomize=True)
@pytest.mark.filterwarnings("ignore")
def test_kind_weights_semantics_weights_multiply_what_is_there_and_carry_no_gradient(seed: int) -> None:
    batch = a_batch(seed)
    draw = np.random.default_rng(seed)
    there = torch.tensor(draw.uniform(0, 2, (12, 5)) * (draw.random((12, 1)) < 0.7)).requires_grad_()
    for name in REWEIGHTERS:
        default = components("reweighter")[name].default_scorer
        scorer = scorer_of(f"of reweighter {name}") if default else build("scorer", "advantage_magnitude")
        decision = Pipeline(scorer, built("reweighter", name)).decide(batch | {"rollout_is_weights": there})
        got = decision.updates(RolloutBatch(batch | {"rollout_is_weights": there}))["rollout_is_weights"]
        assert not got.requires_grad
        want = decision.weights.double().numpy() * there.detach().numpy() * batch["response_mask"].numpy()
        np.testing.assert_allclose(got, want, atol=1e-6, err_msg=name)
        normalize = built("reweighter", name).normalize
        valid = batch["response_mask"].numpy() > 0
        if normalize == "tokens":
            assert decision.weights.numpy()[valid].mean() == pytest.approx(1, abs=1e-5), name


@given(value=st.floats(-3, -0.01), lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4))
@some
def test_kind_weights_semantics_a_mean_over_tokens_does_not_know_their_number(value: float, lengths: list[int]) -> None:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    fields = ("old_log_probs", "entropies", "advantages", "teacher_log_probs")
    batch: dict[str, Any] = dict.fromkeys(fields, torch.full(mask.shape, value)) | {"response_mask": mask}
    batch |= dict.fromkeys(("ref_log_probs", "rollout_log_probs"), torch.full(mask.shape, value / 2))
    for name, level in MEANS.items():
        scores = build("scorer", name, **({"level": level} if level else {})).score(batch)
        torch.testing.assert_close(scores, scores[:1].expand(len(lengths)), rtol=1e-4, atol=1e-6)


@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=6), kind=st.sampled_from(list(BATCHES)))
@some
def test_kind_alignment_every_field_of_every_type_of_batch_takes_the_same_rows(rows: list[int], kind: str) -> None:
    read = RolloutBatch(taken(RolloutBatch(BATCHES[kind]()), torch.tensor(rows), Layout()))
    assert read["rewards"].tolist() == pytest.approx([[0.1, 0.2, 0.3, 0.4][i] for i in rows])
    assert np.asarray(read["lengths"]).tolist() == [[3, 1, 2, 2][i] for i in rows]
    assert list(read["texts"]) == ["abcd"[i] for i in rows]


@given(kept=st.sets(st.integers(0, 7), min_size=1), trim=st.booleans())
@some
def test_kind_alignment_rows_that_leave_leave_every_field_nested_ones_too(kept: set[int], trim: bool) -> None:
    mask = torch.tensor([[1, 1, 0, 0] if i in kept else [0] * 4 for i in range(8)])
    place = torch.arange(8)
    batch = {
        "response_mask": mask, "place": place, "wide": place[:, None].repeat(1, 3), "array": place.numpy() * 10,
        "objects": np.array([f"o{i}" for i in range(8)], dtype=object), "text": tuple("abcdefgh"),
        "nested": {"deep": {"place": place * 2}, "list": list(range(8))}, "original_response_mask": torch.ones(8, 4),
        "temperature": 0.5,
    }  # fmt: skip
    got, want = compacted(RolloutBatch(batch), Layout(), trim=trim), sorted(kept)
    assert got["place"].tolist() == got["wide"][:, 2].tolist() == got["nested"]["list"] == want
    assert [got["nested"]["deep"]["place"].tolist(), got["array"].tolist()] == [
        [2 * i for i in want],
        [10 * i for i in want],
    ]
    assert (list(got["objects"]), got["text"]) == ([f"o{i}" for i in want], tuple("abcdefgh"[i] for i in want))
    assert got["original_response_mask"].shape == got["response_mask"].shape == (len(want), 2 if trim else 4)
    assert got["temperature"] == 0.5


@given(sizes=st.lists(st.integers(0, 11), min_size=1, max_size=6), size=st.integers(1, 4), groups=st.integers(1, 5))
@some
def test_kind_batch_divisibility_ranks_of_any_size_make_as_many_passes_over_every_sample(
    sizes: list[int], size: int, groups: int
) -> None:
    count = max(num_micro_batches(num, size) for num in sizes)
    for num in sizes:
        batch = {
            "response_mask": torch.ones(num, 2),
            "attention_mask": torch.ones(num, 3),
            "row": torch.arange(num) + 1,
        }
        pieces = micro_batches(batch, count)
        assert len(pieces) == count
        assert max(len(piece["row"]) for piece in pieces) <= size
        assert [row for piece in pieces for row in piece["row"].tolist() if row] == list(range(1, num + 1))
        assert sum(piece["response_mask"].sum() for piece in pieces) == 2 * num
        uid = [f"g{i // 2}" for i in range(num)]
        parts = minibatches(uid, groups, torch.Generator().manual_seed(0))
        assert (len(parts), sorted(row for part in parts for row in part)) == (groups, list(range(num)))
        assert all(
            uid.count(name) == [uid[r] for r in part].count(name) for part in parts for name in {uid[r] for r in part}
        )
        assert len(sliced(batch, parts[0])["row"]) == len(parts[0])


@given(seed=SEEDS, cuts=st.lists(st.integers(1, 11), max_size=3, unique=True))
@some
@pytest.mark.filterwarnings("ignore")
def test_kind_metrics_numbers_of_a_step_are_those_of_its_samples_however_it_was_cut(seed: int, cuts: list[int]) -> None:
    batch = a_batch(seed) | {"uid": [f"g{i}" for i in range(12)]}
    batch["rm_scores"][seed % 12] = NAN
    rule = Pipeline(build("scorer", "outcome"), build("selector", "threshold_band", low=0.3, high=0.8))
    borders = [0, *sorted(cuts), 12]
    parts = [rule.decide({k: v[a:b] for k, v in batch.items()}).summary for a, b in itertools.pairwise(borders)]
    got = {name: float(value) for name, value in merged(parts).items()}
    rewards, lengths = batch["rm_scores"].double().numpy(), batch["response_mask"].sum(1).numpy()
    keep = (rewards > 0.3) & (rewards < 0.8)
    share = (keep * lengths).sum() / lengths.sum()
    want = {
        "kept_frac": keep.mean(), "n_nan": 1, "reward_all": np.nanmean(rewards), "ess": keep.sum(),
        "weight_mean": share, "weight_std": np.sqrt(share * (1 - share)),
        "reward_kept": rewards[keep].mean() if keep.any() else 0.0,
        "frac_zero_std": 1.0, "dropped_nan": 1, "dropped_rule": 0,
    }  # fmt: skip
    assert {name: got[name] for name in want} == pytest.approx(want, abs=1e-5)


@given(st.lists(st.lists(st.sampled_from([NAN, 0.0, 0.5, 2.0]), min_size=3, max_size=3), min_size=1, max_size=30))
@some
def test_kind_metrics_a_window_forgets_and_a_mean_is_of_samples(steps: Any) -> None:
    stats, window = DomainStats(list("abc"), 5), 5
    seen: list[list[float]] = [[], [], []]
    for step, scores in enumerate(steps):
        # As many samples as the number of the step says.
        num = 1 + step % 3
        stats.add(step, DomainSums.of(torch.tensor(scores * num), torch.arange(3).repeat(num), 3))
        for domain, score in enumerate(scores):
            seen[domain] += [] if np.isnan(score) else [(score, num)]  # type: ignore[list-item]
    for domain, of in enumerate(seen):
        values = [score for score, num in of[-window:] for _ in range(num)]  # type: ignore[misc]
        assert len(stats.history["abc"[domain]]) <= window
        if values:
            assert float(stats.mean[domain]) == pytest.approx(np.mean(values))
            assert float(stats.variance[domain]) == pytest.approx(np.var(values), abs=1e-9)
        assert stats.count[domain] == sum(num for _, num in of)  # type: ignore[misc]
