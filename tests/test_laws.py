"""The laws that every component keeps: a drop is a deletion, effects multiply, order and padding do not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex import Decision, RolloutBatch
from lightning_dataflex.core.samples import Layout, compacted
from lightning_dataflex.functional.loss import policy_loss
from tests.laws import FIELDS, PER_TOKEN, a_batch, over, pipeline_of, scorer_of, scores_everything, together
from tests.ranks import taken

NAN, INF = float("nan"), float("inf")
SEEDS = st.integers(0, 10_000)


def plain_loss(x: dict, mask: torch.Tensor, weights: torch.Tensor, aggregation: str) -> torch.Tensor:
    """The loss by its definition; no ratio is near a clip."""
    lengths = mask.sum(-1)
    num = lengths.sum() if aggregation == "token-mean" else (lengths > 0).sum()
    share = (1 / lengths if aggregation == "seq-mean-token-mean" else torch.ones(len(lengths))) / num
    log_ratio = x["log_probs"] - x["ref_log_probs"]
    policy = -weights * x["advantages"] * torch.exp(x["log_probs"] - x["old_log_probs"])
    per_token = policy + 0.1 * (torch.exp(-log_ratio) - 1 + log_ratio) - 0.05 * x["entropies"]
    return (per_token * share[:, None])[mask.bool()].sum()


def package_loss(x: dict, mask: torch.Tensor, weights: torch.Tensor, aggregation: str) -> torch.Tensor:
    return policy_loss(
        **x,
        response_mask=mask,
        rollout_is_weights=weights,
        aggregation=aggregation,
        clip_low=0.9,
        clip_high=9.0,
        kl_coef=0.1,
        entropy_coef=0.05,
    ).loss


def deleted(keep: torch.Tensor, *tables: torch.Tensor) -> list[torch.Tensor]:
    """The tables with every token that is not kept taken out, and every row that has none left."""
    order = torch.argsort((~keep).long(), dim=-1, stable=True)[:, : int(keep.sum(-1).max())]
    return [table.gather(1, order)[keep.any(-1)] for table in (keep, *tables)]


def inputs(batch: dict, advantages: torch.Tensor, seed: int = 1) -> dict:
    rng = torch.Generator().manual_seed(seed)
    shape = batch["response_mask"].shape
    old = batch["old_log_probs"]
    return {
        "log_probs": (old + 0.2 * torch.randn(shape, generator=rng)).requires_grad_(),
        "entropies": torch.rand(shape, generator=rng).requires_grad_(),
        "ref_log_probs": old + 0.2 * torch.randn(shape, generator=rng),
        "old_log_probs": old,
        "advantages": advantages,
    }


def gradients(loss: torch.Tensor, x: dict) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, (x["log_probs"], x["entropies"]), retain_graph=True)


@over("selector", "reweighter")
def test_law_2_a_drop_is_a_deletion_or_a_weight_as_asked(scorer, kind, actuator):
    batch = a_batch()
    for name in FIELDS:
        batch[name][0] = NAN
    pipeline, num_missing = pipeline_of(scorer, kind, actuator), 0 if scores_everything(scorer) else 1
    if num_missing:
        with pytest.warns(UserWarning, match="1 samples have no score"):
            decision = pipeline.decide(batch)
    else:
        decision = pipeline.decide(batch)
    kept = decision.keep if decision.keep.dim() == 2 else decision.keep[:, None] & batch["response_mask"].bool()
    assert 0 < kept.sum() <= batch["response_mask"].sum() - num_missing
    for drop in ("mask", "rows", "weight"):
        updates = decision.updates(RolloutBatch(batch), drop=drop)
        x = inputs({k: torch.nan_to_num(v) if k in FIELDS else v for k, v in batch.items()}, updates.get("advantages"))
        x["advantages"] = torch.nan_to_num(batch["advantages"] if x["advantages"] is None else x["advantages"])
        seen = batch | updates
        if drop == "rows":
            seen = compacted(RolloutBatch(seen | x), Layout.of(token_fields=x), trim=True)
            assert len(seen["uid"]) == kept.any(-1).sum() <= len(kept) - num_missing
        inside = {name: seen[name] if drop == "rows" else value for name, value in x.items()}
        for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
            loss = package_loss(inside, seen["response_mask"], seen["rollout_is_weights"], aggregation)
            if drop == "weight":
                expected = plain_loss(x, batch["response_mask"], decision.weights * kept, aggregation)
            else:
                rest, weights, *tables = deleted(kept, decision.weights, *x.values())
                expected = plain_loss(dict(zip(x, tables)), rest, weights, aggregation)
            case = f"{drop}, {aggregation}: {{}}".format
            torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5, msg=case)
            for got, want in zip(gradients(loss, x), gradients(expected, x)):
                torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5, msg=case)


@over("selector", "reweighter")
@pytest.mark.parametrize(
    "other",
    [("advantage_magnitude", "selector", "topk_fraction"), ("reward_difficulty", "reweighter", "softmax")],
    ids=str,
)
def test_law_3_effects_multiply_in_any_order(scorer, kind, actuator, other):
    batch = a_batch(3) | {"rollout_is_weights": torch.rand(12, 5, generator=torch.Generator().manual_seed(0)) + 0.5}
    pipelines = [pipeline_of(scorer, kind, actuator), pipeline_of(*other)]
    results = []
    for order in (pipelines, pipelines[::-1]):
        current = RolloutBatch(batch)
        for pipeline in order:
            current = RolloutBatch(current.replaced(pipeline.decide(current).updates(current)))
        results.append(current)
    alone = [pipeline.decide(batch).weights for pipeline in pipelines]
    expected = batch["rollout_is_weights"] * alone[0] * alone[1]
    for result in results:
        torch.testing.assert_close(result["rollout_is_weights"], expected)
    assert torch.equal(results[0]["response_mask"], results[1]["response_mask"])


def assert_same(got, want, rows=slice(None), ties: bool = False) -> None:
    """Two decisions agree; where scores tie, which of the equals is kept may differ but not how many."""
    torch.testing.assert_close(got.scores, want.scores[rows], equal_nan=True)
    if ties:
        assert sorted(zip(got.scores.tolist(), got.keep.tolist())) == sorted(
            zip(want.scores.tolist(), want.keep.tolist())
        )
        return
    assert torch.equal(got.keep, want.keep[rows])
    torch.testing.assert_close(got.weights, want.weights[rows])
    if want.advantages is not None:
        torch.testing.assert_close(got.advantages, want.advantages[rows])


@over("selector", "reweighter")
@given(seed=SEEDS)
@settings(max_examples=3, deadline=None)
def test_law_4_rows_may_be_permuted_and_groups_renamed(scorer, kind, actuator, seed):
    batch = a_batch(seed)

    def decided(some: dict) -> Decision:
        return pipeline_of(scorer, kind, actuator).decide(some)

    whole = decided(batch)
    order = np.random.default_rng(seed).permutation(12).tolist()
    tied = scorer_of(scorer).granularity == "prompt" or scorer in ("staleness", "response_length")
    if tied and actuator == "nearest":  # 1/4 and 3/4 are as near to 1/2
        assert decided(taken(batch, order)).num_kept == whole.num_kept
        return
    assert_same(decided(taken(batch, order)), whole, order, tied and actuator == "topk_fraction")
    if actuator in ("bernoulli", "dots"):  # their draws follow from the names
        return
    for names in (
        [{"a": "z", "b": "", "c": "a"}[u] for u in batch["uid"]],
        torch.tensor([-ord(u) for u in batch["uid"]]),
    ):
        assert_same(decided(batch | {"uid": names}), whole)


@over("selector", "reweighter")
@given(seed=SEEDS, dirt=st.sampled_from([NAN, INF, -INF, 1e30]))
@settings(max_examples=3, deadline=None)
@pytest.mark.filterwarnings("ignore:2 samples have no score")
@pytest.mark.filterwarnings("ignore:.*alone in its group")
def test_law_4_padding_and_samples_without_a_score_change_nothing(scorer, kind, actuator, seed, dirt):
    batch, pipeline = a_batch(seed), pipeline_of(scorer, kind, actuator)
    whole = pipeline.decide(batch)
    empty, missing = taken(a_batch(seed + 1), [0, 1]), taken(a_batch(seed + 2), [0, 1])
    empty["response_mask"] = empty["response_mask"] * 0
    for name in FIELDS:
        empty[name], missing[name] = torch.full_like(empty[name], dirt), torch.full_like(missing[name], NAN)
    parts = (empty, batch) if scores_everything(scorer) else (empty, batch, missing)
    wide = together(*parts)
    mask = wide["response_mask"] > 0
    for name in ("response_mask", *PER_TOKEN):
        blank = 0 if name == "response_mask" else dirt
        wide[name] = torch.nn.functional.pad(torch.where(mask, wide[name], blank), (1, 2), value=blank)
    decision = pipeline.decide(wide)
    for name in ("scores", "keep", "weights"):
        got = getattr(decision, name)
        torch.testing.assert_close(got[2:14] if got.dim() == 1 else got[2:14, 1:6], getattr(whole, name))
    decision.weights[2:14, 1:6] = 0
    assert decision.weights.count_nonzero() == 0
    assert decision.num_kept == whole.num_kept == decision.keep[2:14].sum()
