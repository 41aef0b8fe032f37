"""Faults reported of training runs, each with the identifier under which it was collected; with a Trainer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from examples.rlhf import RLHFModule
from lightning_dataflex import DataFlexCallback, DataFlexPoint
from lightning_dataflex.functional.loss import loss_denominator
from tests.toy import fit


def batch_of(rewards: list[float], uid: str) -> dict[str, Any]:
    return {"rm_scores": torch.tensor(rewards), "uid": list(uid), "response_mask": torch.ones(len(uid), 1)}


def keep_all() -> DataFlexCallback:
    band = {"name": "threshold_band", "params": {"low": -1.0, "high": 2.0}}
    return DataFlexCallback("select", "outcome", band)


class Watch(Callback):
    """What was logged, the loss that other callbacks are given, and the gradient of each optimiser step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.outputs: list[float] = []
        self.gradients: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})
        self.outputs.append(float(outputs["loss"]) if outputs else float("nan"))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append(float(module.weight.grad))


class Slope(LightningModule):
    """The mean weight of the kept tokens times a parameter of 1: loss and gradient are 1 where all are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.dataflex = DataFlexPoint()
        self.weight = nn.Parameter(torch.ones(()))
        self.losses: list[float] = []

    def loss(self, batch: Any, denominator: Any) -> Tensor:
        return (self.weight * batch["rollout_is_weights"]).sum() / denominator

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = self.dataflex(batch)
        loss = self.loss(batch, batch["response_mask"].sum().clamp(min=1))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Windows(Slope):
    """Makes each optimiser step of two batches itself, or of what is left, over the tokens of that step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gradients: list[float] = []

    def training_step(self, batches: Any, batch_idx: int) -> None:
        decided = [self.dataflex(batch) for batch in batches]
        denominator = loss_denominator(torch.cat([batch["response_mask"] for batch in decided]), "token-mean")
        for batch in decided:
            self.manual_backward(self.loss(batch, denominator))
        self.gradients.append(float(self.weight.grad))
        self.optimizers().step()
        self.optimizers().zero_grad()


def test_R005_steps_without_signal_in_a_row_end_with_a_loss_of_zero_and_one_warning() -> None:
    module, watch = Slope(), Watch()
    without = [batch_of([1.0] * 8, "aaaabbbb"), batch_of([1.0] * 8, "ccccdddd"), batch_of([1.0] * 8, "eeeeffff")]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(module, [DataFlexCallback("select", "group_solve_rate", "threshold_band"), watch], without)
    assert module.losses == [0.0] * 3
    assert [row["dataflex/kept_frac"] for row in watch.logged] == [0.0] * 3
    assert module.weight.item() == 1.0
    assert sum("keeps no sample" in str(each.message) for each in said) == 1


def test_R001_a_group_of_equal_totals_is_warned_of_once_and_moves_nothing() -> None:
    module, watch = Slope(), Watch()
    rewards = [first + second for first, second in zip([1.0, 0, 1, 0], [0.0, 1, 0, 1])]
    with pytest.warns(UserWarning, match=r"keeps no sample. Scores: 1 to 1") as said:
        fit(
            module,
            [DataFlexCallback("select", "group_solve_rate", "threshold_band"), watch],
            [batch_of(rewards, "aaaa")],
        )
    assert sum("keeps no sample" in str(each.message) for each in said) == 1
    assert (watch.logged[0]["dataflex/kept_frac"], watch.logged[0]["dataflex/frac_zero_std"]) == (0.0, 1.0)
    assert (module.losses, module.weight.item()) == ([0.0], 1.0)


def test_R028_the_last_shorter_window_of_lightning_is_half_and_that_of_the_loss_is_whole() -> None:
    batches, watch = [batch_of([1.0, 0.0], "ab")] * 3, Watch()
    fit(Slope(), [keep_all(), watch], batches, accumulate_grad_batches=2)
    fit(module := Windows(), [keep_all()], [batches[:2], batches[2:]])
    # Lightning divides by accumulate_grad_batches, however many batches there were: docs/ranks.md says so.
    assert watch.gradients == [1.0, 0.5]
    assert module.gradients == [1.0, 1.0]


def test_R041_one_generation_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(ValueError, match=r"num_generations is 1, but grpo compares.*at least 2"):
        RLHFModule(adv_estimator="grpo", num_generations=1)
    with pytest.raises(ValueError, match="but rloo compares"):
        RLHFModule(adv_estimator="rloo", num_generations=1)
    assert RLHFModule(adv_estimator="gae", num_generations=1).sampling.num_generations == 1


def test_R067_nothing_here_depends_on_the_loss_that_lightning_has_divided() -> None:
    batches = [batch_of([1.0, 0.0], "ab"), batch_of([1.0, 1.0], "cd")]
    fit(one := Slope(), [keep_all(), alone := Watch()], batches)
    fit(two := Slope(), [keep_all(), halved := Watch()], batches, accumulate_grad_batches=2)
    assert one.losses == pytest.approx([1.0, 0.99])
    # What Lightning hands to callbacks is half of what the module has computed.
    assert (two.losses, halved.outputs) == ([1.0, 1.0], [0.5, 0.5])
    assert alone.logged == halved.logged
    assert alone.logged[0]["dataflex/reward_all"] == 0.5
