"""What is decided stays as it is, and nothing of it carries a gradient."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from lightning_dataflex import Mixer, Mixture, Pipeline, Reweighter, Scorer
from lightning_dataflex.core.action import Action
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.domains import DomainStats, DomainSums
from lightning_dataflex.core.history import Visits
from lightning_dataflex.core.sample_group import SampleGroup
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.summary import Summary


@pytest.mark.parametrize("cls", [Action, Decision, DomainSums, Layout, SampleGroup, Summary, Visits])
def test_values_are_frozen(cls: Any) -> None:
    fields = dataclasses.fields(cls)
    value = cls(*[None] * len(fields))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, fields[0].name, 1)


def test_layouts_can_be_compared_and_kept_in_sets() -> None:
    assert len({Layout(), Layout.of(), Layout.of(["a"])}) == 2


def test_statistics_begin_empty_whatever_is_given() -> None:
    assert list(inspect.signature(DomainStats).parameters) == ["domains", "window", "step"]


class Graded(Scorer):
    """Gives scores with a gradient, and notes whether there can be any."""

    requires = ("x",)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
        self.grad_enabled = torch.is_grad_enabled()
        return batch["x"] * self.factor

    factor = torch.ones(1, requires_grad=True)


class Gradient(Reweighter):
    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        self.grad_enabled = torch.is_grad_enabled()
        return scores * Graded.factor


class Shares(Mixer):
    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        self.grad_enabled = torch.is_grad_enabled()
        return [0.5, 0.5]


def test_no_decision_makes_a_graph() -> None:
    batch = {"x": torch.ones(2, requires_grad=True), "response_mask": torch.ones(2, 1), "domain": ["a", "b"]}
    scorer, rule, mixer = Graded(), Gradient(), Shares()
    decision = Pipeline(scorer, rule).decide(batch)
    assert not decision.weights.requires_grad
    assert not decision.scores.requires_grad
    assert (scorer.grad_enabled, rule.grad_enabled) == (False, False)
    mixture = Mixture(Graded(), mixer, domains=["a", "b"])
    mixture.observe(batch)
    mixture.end_step(0)
    assert (mixture.scorer.grad_enabled, mixer.grad_enabled) == (False, False)
    # Asked by itself, a rule gives plain numbers too.
    assert not Graded().score(batch).requires_grad
    assert not Gradient().act(torch.ones(2), batch).requires_grad
