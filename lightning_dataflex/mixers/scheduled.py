"""Mixers that go from easy to hard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dataflex.core.checks import check_finite, check_range, check_whole, listed
from lightning_dataflex.core.domains import DomainSums, check_names
from lightning_dataflex.core.mixer import Mixer
from lightning_dataflex.core.registry import register_mixer
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional import mixing
from lightning_dataflex.functional.choices import check_choice, shown
from lightning_dataflex.functional.proportions import FloorMethod, check_floor, floored
from lightning_dataflex.mixers.base import Floored


@register_mixer("e2h")
class E2H(Mixer):
    """From easy to hard with the progress of the run, whatever the scores say.

    Args:
        order: The domains from easy to hard. Default: the order of the domains.
        schedule: `gaussian`, a bell that moves over the domains, or `cosine`, from the easy half to the hard half.
        exponent: Of the bell's way: its middle is at progress^exponent.
        sigma: Width of the bell, in domains.
        floor: Least proportion of a domain. Default: the authors', 2 / (K (K + 1)).
        total_steps: Steps of the run. Default: what the Trainer says.
    """

    paper = "E2H Reasoner, arXiv:2506.06632"
    needs_data = False

    def __init__(
        self,
        order: list[str] | None = None,
        schedule: Literal["gaussian", "cosine"] = "gaussian",
        exponent: float = 0.5,
        sigma: float = 0.5,
        floor: float | None = None,
        total_steps: int | None = None,
    ) -> None:
        check_choice("schedule", schedule, Literal["gaussian", "cosine"])
        if total_steps is not None:
            check_whole("total_steps", total_steps, 1)
        self.needs_progress = total_steps is None
        check_range("exponent", exponent, 0, math.inf, open_low=True)
        check_range("sigma", sigma, 0, math.inf, open_low=True)
        check_range("floor", 0.0 if floor is None else floor, 0, 1)
        self.order, self.schedule, self.exponent, self.sigma = order, schedule, exponent, sigma
        self.floor, self.total_steps = floor, total_steps

    def bind(self, domains: Sequence[str]) -> None:
        num = len(domains)
        self.least = 2 / (num * (num + 1)) if self.floor is None else self.floor
        check_floor(self.least, num)
        check_names("order", self.order or domains, domains)
        super().bind(domains)
        if self.order is None:
            warn_once(
                self,
                f"e2h takes {listed(domains)} for the way from easy to hard. Give order to say so or otherwise.",
            )

    def act(self, scores: Any, batch: Any, **ctx: Any) -> dict[str, float]:
        progress = ctx.get("progress")
        if self.total_steps is not None:
            progress = ctx["step_id"] / self.total_steps
        if progress is None:
            raise ValueError("e2h needs to know how long the run is. Give total_steps, or the Trainer max_steps.")
        progress, num = min(max(progress, 0.0), 1.0), len(self.domains)
        if self.schedule == "cosine":
            shares = floored(mixing.e2h_cosine(progress, num), self.least)
        else:
            shares = mixing.e2h_gaussian(progress, num, self.exponent, self.sigma, self.least)
        return dict(zip(self.order or self.domains, shares.tolist()))


@register_mixer("adarft")
class AdaRFT(Floored):
    """Prompts around a target difficulty, which rises while the reward is above `beta` and falls while it is below.

    The paper takes the prompts nearest to the target; of domains, the two next to it, so that the mean difficulty
    is the target.

    Args:
        difficulty: Of each domain, on any scale.
        target: The first target. Default: the least difficulty.
        eta: Largest step of the target. Default: half the range of difficulties, as in the paper.
        alpha: How steeply the step follows the reward.
        beta: The reward to stay at.
        floor: Least proportion of a domain; the paper has none.
        floor_by: `water_filling` or `mixture`.
    """

    signals = ("reward",)
    paper = "AdaRFT, arXiv:2504.05520"
    needs_data = False

    def __init__(
        self,
        difficulty: dict[str, float],
        target: float | None = None,
        eta: float | None = None,
        alpha: float = 2.0,
        beta: float = 0.5,
        floor: float = 0.05,
        floor_by: FloorMethod = "water_filling",
    ) -> None:
        super().__init__(floor, floor_by, window=1)
        if not isinstance(difficulty, dict):
            raise ValueError(f"difficulty is {shown(difficulty)}. Give a mapping of domains to numbers.")
        self.difficulty = dict(difficulty)
        levels = list(self.difficulty.values()) or [0.0]
        for name, value in (*difficulty.items(), ("target", target), ("eta", eta)):
            check_finite(name, 0.0 if value is None and name in ("target", "eta") else value)
        check_finite("alpha", alpha)
        check_finite("beta", beta)
        self.eta = (max(levels) - min(levels)) / 2 if eta is None else eta
        self.alpha, self.beta = alpha, beta
        self.low, self.high = min(levels), max(levels)
        self.target = self.low if target is None else min(max(target, self.low), self.high)

    def bind(self, domains: Sequence[str]) -> None:
        check_names("difficulty", list(self.difficulty), domains)
        super().bind(domains)

    def observe(self, sums: DomainSums, proportions: Tensor) -> None:
        if sums.count.sum() > 0:
            mean = float(sums.total.sum() / sums.count.sum())
            moved = mixing.adarft_target(self.target, mean, eta=self.eta, alpha=self.alpha, beta=self.beta)
            self.target = min(max(moved, self.low), self.high)

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        levels = torch.tensor([self.difficulty[name] for name in self.domains], dtype=torch.float64)
        return self.floored(mixing.around(self.target, levels))

    def state_dict(self) -> dict[str, Any]:
        return {"target": self.target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.target = min(max(state["target"], self.low), self.high)
