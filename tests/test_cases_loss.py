"""Faults reported of losses of this kind, each with the identifier under which it was collected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, RolloutBatch, build
from lightning_dataflex.core.domains import DomainStats, DomainSums
from lightning_dataflex.functional.advantages import (
    group_advantages,
    grpo_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from lightning_dataflex.functional.loss import loss_denominator, policy_loss
from lightning_dataflex.functional.weighting import row_means

NAN, INF = float("nan"), float("inf")
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def loss_of(per_token, mask, **more) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of per-token terms as given: a ratio of 1 times an advantage of the opposite sign."""
    log_probs = torch.zeros(mask.shape, requires_grad=True)
    loss = policy_loss(log_probs, torch.zeros(mask.shape), -per_token, mask, **more).loss
    assert loss.requires_grad
    loss.backward()
    return loss.detach(), log_probs.grad


def select(batch, scorer="group_solve_rate", actuator="threshold_band", **params) -> dict:
    batch = RolloutBatch(batch)
    decision = Pipeline(build("scorer", scorer), build("selector", actuator, **params)).decide(batch)
    return batch.replaced(decision.updates(batch))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_R001_a_group_of_equal_totals_has_a_loss_of_exactly_zero(aggregation):
    rewards = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]]).sum(0)
    batch = select({"uid": ["a"] * 4, "rm_scores": rewards, "response_mask": torch.ones(4, 2)})
    advantages = grpo_advantages(rewards, torch.zeros(4).long())
    weights = batch["rollout_is_weights"]
    loss, grad = loss_of(-advantages, batch["response_mask"], rollout_is_weights=weights, aggregation=aggregation)
    assert advantages.tolist() == [0] * 4
    assert loss.item() == 0
    assert grad.abs().max() == 0


def test_R004_no_advantage_is_a_reward_over_next_to_nothing():
    rewards, ids = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.zeros(4).long()
    np.testing.assert_allclose(rloo_advantages(rewards, ids), [-1, 1 / 3, 1 / 3, 1 / 3], atol=1e-6)
    # The deviation is that of the whole group, 0.5 here, and never that of the three that are alike.
    np.testing.assert_allclose(grpo_advantages(rewards, ids), [-1.5, 0.5, 0.5, 0.5], atol=1e-5)
    every = [group_advantages(rewards, ids, name) for name in ("grpo", "dr_grpo", "rloo")]
    every += [reinforce_advantages(rewards), reinforce_advantages(rewards, ids)]
    assert max(float(each.abs().max()) for each in every) <= 10


def test_R008_a_weight_of_zero_hides_an_infinite_loss():
    weights = torch.tensor([[1.0, 0.0]])
    loss, grad = loss_of(
        torch.tensor([[0.5, INF]]), torch.ones(1, 2), aggregation="seq-mean-token-sum", rollout_is_weights=weights
    )
    assert loss.item() == 0.5
    assert grad.tolist() == [[0.5, 0]]


def test_R009_a_masked_nan_is_not_seen_and_a_soft_weight_is_applied():
    weights = torch.tensor([[0.5, 1.0]])
    loss, grad = loss_of(
        torch.tensor([[2.0, NAN]]), torch.tensor([[1, 0]]), aggregation="seq-mean-token-sum", rollout_is_weights=weights
    )
    assert loss.item() == 1.0
    assert grad.tolist() == [[1, 0]]


def test_R022_a_selection_masks_and_does_not_centre_again():
    advantages = torch.tensor([0.7071, -0.7071, 0.0, 0.0])
    batch = select(
        {"uid": list("aabb"), "advantages": advantages, "response_mask": torch.ones(4, 1)},
        scorer="advantage_magnitude",
        actuator="topk_fraction",
        fraction=0.25,
    )
    loss, grad = loss_of(-batch["advantages"], batch["response_mask"], rollout_is_weights=batch["rollout_is_weights"])
    assert loss.item() == pytest.approx(-0.7071)
    np.testing.assert_allclose(grad[:, 0], [-0.7071, 0, 0, 0], atol=1e-6)


def test_R024_dropped_tokens_leave_the_denominator_and_the_batch_keeps_its_count():
    mask = torch.ones(5, 8, dtype=torch.int64)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    whole = {"uid": list("aabbc"), "rm_scores": rewards, "response_mask": mask}
    batch = select(whole)
    loss, _ = loss_of(torch.ones(5), batch["response_mask"], rollout_is_weights=batch["rollout_is_weights"])
    assert batch["response_mask"].sum() == 32
    assert loss.item() == 1.0
    assert whole["response_mask"].sum() == 40
    assert RolloutBatch(batch).num_tokens.sum() == 40


def test_R025_the_loss_does_not_depend_on_the_cut_into_micro_batches():
    masks = torch.tensor([[1] + [0] * 8]), torch.ones(1, 9)
    denominator = loss_denominator(torch.cat(masks), "token-mean")
    first, _ = loss_of(torch.tensor([10.0]), masks[0], denominator=denominator)
    second, _ = loss_of(torch.tensor([0.0]), masks[1], denominator=denominator)
    assert (first + second).item() == 1.0


def test_R026_the_denominator_is_that_of_the_optimiser_step():
    mask = torch.ones(1, 2)
    denominator = loss_denominator(torch.cat([mask, mask]), "token-mean")
    for _ in range(2):
        micro_steps = [loss_of(torch.ones(1), mask, denominator=denominator)[0] for _ in range(2)]
        assert sum(micro_steps).item() == 1.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("drop", ["mask", "weight"])
def test_R027_nothing_kept_gives_a_connected_zero(aggregation, drop):
    ones, zeros = torch.ones(3, 4), torch.zeros(3, 4)
    mask = zeros if drop == "mask" else ones
    loss, grad = loss_of(torch.full((3, 4), 7.0), mask, rollout_is_weights=zeros, aggregation=aggregation)
    assert loss.item() == 0
    assert torch.equal(grad, zeros)


def test_R029_weights_that_come_from_the_policy_carry_no_gradient():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    batch = {"old_log_probs": log_probs, "response_mask": torch.ones(1, 2)}
    rule = build("reweighter", "advantage_reweight", alpha=0.5, normalize="tokens")
    weights = Pipeline(build("scorer", "token_prob"), rule).decide(batch).weights
    # The score function alone: A = 1 and a ratio of 1, whose gradient is the weight over the number of tokens.
    policy_loss(
        log_probs, log_probs.detach(), torch.ones(1), torch.ones(1, 2), rollout_is_weights=weights
    ).loss.backward()
    assert not weights.requires_grad
    np.testing.assert_allclose(weights, [[1.0929, 0.9071]], atol=1e-4)
    np.testing.assert_allclose(log_probs.grad, [[-0.5464, -0.4536]], atol=1e-4)


def test_R060_means_heed_their_weights():
    values = torch.tensor([[1.0, 3.0]])
    mean, total = row_means(values, values)
    assert (mean.item(), total.item()) == (2.5, 4)
    # The window of a domain: a step with one sample of 1, and one with three of 3.
    stats = DomainStats(["a"])
    for step, scores in enumerate(([1.0], [3.0] * 3)):
        stats.add(step, DomainSums.of(torch.tensor(scores), torch.zeros(len(scores)), 1))
    assert stats.mean.item() == 2.5
