"""Mixers with a memory of their own: averages, and the weights of bandits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.checks import check_finite, check_range, check_whole
from lightning_dataflex.core.domains import DomainSums, of_domains
from lightning_dataflex.core.mixer import Mixer
from lightning_dataflex.core.registry import register_mixer
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional import mixing
from lightning_dataflex.functional.proportions import FloorMethod, matched, normalised, optimistic
from lightning_dataflex.mixers.base import Floored


@register_mixer("dads")
class DADS(Floored):
    """exp of what a moving average of the reward lacks to the target, plus a constant.

    Args:
        alpha: In [0, 1), how much of the average stays at each step.
        temperature: > 0.
        eps: >= 0, added to each weight.
        target: Reward of a mastered domain. Rewards must lie in [0, 1].
        floor: Least proportion of a domain; the paper has none but `eps`.
        floor_by: `water_filling` or `mixture`.
    """

    signals = ("reward",)
    paper = "RuleReasoner, arXiv:2506.08672"

    def __init__(
        self,
        alpha: float = 0.5,
        temperature: float = 0.5,
        eps: float = 0.1,
        target: float = 1.0,
        floor: float = 0.0,
        floor_by: FloorMethod = "water_filling",
    ) -> None:
        super().__init__(floor, floor_by, window=50)
        check_range("alpha", alpha, 0, 1)
        check_range("temperature", temperature, 0, math.inf, open_low=True)
        check_range("eps", eps, 0, math.inf)
        check_finite("target", target)
        check_finite("eps", eps)
        self.alpha, self.temperature, self.eps, self.target = alpha, temperature, eps, target
        self.ema: dict[str, float] = {}

    def observe(self, sums: DomainSums, proportions: Tensor) -> None:
        check_unit_interval(self, sums.mean)
        for name, mean in known(self.domains, sums.mean).items():
            self.ema[name] = self.alpha * self.ema[name] + (1 - self.alpha) * mean if name in self.ema else mean

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        ema = torch.tensor([self.ema.get(name, math.nan) for name in self.domains], dtype=torch.float64)
        return self.floored(mixing.dads(ema, self.temperature, self.eps, self.target))

    def state_dict(self) -> dict[str, Any]:
        return {"ema": dict(self.ema)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ema = of_domains(state["ema"], self.domains)


class Bandit(Mixer):
    """A rule that adds up importance-weighted estimates of each domain's signal, as a share of `max_signal`."""

    signals = ("advantage", "reward", "variance")
    default_scorer = "advantage_magnitude"

    def __init__(self, max_signal: float) -> None:
        check_range("max_signal", max_signal, 0, math.inf, open_low=True)
        self.max_signal = max_signal
        self.estimates: dict[str, float] = {}

    def observe(self, sums: DomainSums, proportions: Tensor) -> None:
        signal = (sums.mean / self.max_signal).clamp(0, 1)
        gain = mixing.importance_estimate(signal, sums.count, proportions)
        for name, value in zip(self.domains, gain.tolist()):
            self.estimates[name] = self.estimates.get(name, 0.0) + value

    def known_estimates(self) -> Tensor:
        return torch.tensor([self.estimates.get(name, 0.0) for name in self.domains], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"estimates": dict(self.estimates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimates = of_domains(state["estimates"], self.domains)


@register_mixer("exp3")
class Exp3(Bandit):
    """Exponential weights of the estimated signal, and an exact share gamma / K of exploration for each domain.

    Args:
        gamma: In (0, 1], the share of exploration, and the learning rate.
        max_signal: The signal, from 0 to this, is scaled to [0, 1] and cut there.
    """

    paper = "Exp3, Auer et al. 2002"

    def __init__(self, gamma: float = 0.1, max_signal: float = 1.0) -> None:
        super().__init__(max_signal)
        check_range("gamma", gamma, 0, 1, open_low=True)
        self.gamma = gamma

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        return mixing.exp3(self.gamma * self.known_estimates() / len(self.domains), self.gamma)


@register_mixer("odm")
class ODM(Bandit):
    """Exp3 whose exploration shrinks as sqrt(ln K / (K t)), and is the exact least share of each domain.

    Args:
        max_signal: The signal, from 0 to this, is scaled to [0, 1] and cut there. The paper divides losses by 10.
    """

    paper = "ODM, arXiv:2312.02406"

    def __init__(self, max_signal: float = 1.0) -> None:
        super().__init__(max_signal)
        self.turn = 0

    def observe(self, sums: DomainSums, proportions: Tensor) -> None:
        super().observe(sums, proportions)
        self.turn += 1

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        now, before = (mixing.odm_exploration(len(self.domains), turn) for turn in (self.turn, self.turn - 1))
        return mixing.odm(self.known_estimates(), now, before)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"turn": self.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.turn = state["turn"]


@register_mixer("doremi")
class DoReMi(Mixer):
    """Multiplicative steps towards the domains that lack most to the target reward, smoothed by equal shares.

    Args:
        eta: Step size.
        c: In [0, 1], the share of the mixture that is equal shares; each domain has at least c / K.
        target: Reward of a mastered domain; what is above it counts as nothing lacking.
        averaged: Use the average of the proportions of all steps, which is the paper's result, in place of the last.
        window: Steps that the reward is averaged over. A domain absent from a step keeps its score.
    """

    signals = ("reward",)
    paper = "DoReMi, arXiv:2305.10429"

    def __init__(
        self, eta: float = 1.0, c: float = 0.001, target: float = 1.0, averaged: bool = False, window: int = 1
    ) -> None:
        check_range("eta", eta, 0, math.inf)
        check_range("c", c, 0, 1)
        check_whole("window", window, 1)
        check_finite("target", target)
        check_finite("eta", eta)
        self.eta, self.c, self.target, self.averaged, self.window = eta, c, target, averaged, window
        self.current: dict[str, float] = {}
        self.total: dict[str, float] = {}

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        excess = optimistic(self.target - ctx["stats"].mean)
        before = torch.tensor(list(matched(self.current, self.domains).values()), dtype=torch.float64)
        here = mixing.doremi(before, excess, self.eta, self.c)
        self.current = dict(zip(self.domains, here.tolist()))
        self.total = {name: self.total.get(name, 0.0) + value for name, value in self.current.items()}
        return normalised(torch.tensor(list(self.total.values()), dtype=torch.float64)) if self.averaged else here

    def state_dict(self) -> dict[str, Any]:
        return {"current": dict(self.current), "total": dict(self.total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current, self.total = (of_domains(state[key], self.domains) for key in ("current", "total"))


def known(domains: Sequence[str], values: Tensor) -> dict[str, float]:
    """The values by name, without NaN."""
    return {name: value for name, value in zip(domains, values.tolist()) if not math.isnan(value)}


def check_unit_interval(mixer: Mixer, rewards: Tensor) -> None:
    """Warn once of rewards that a rule for [0, 1] cannot read."""
    outside = rewards[(rewards < -1e-6) | (rewards > 1 + 1e-6)]
    if len(outside):
        warn_once(
            mixer,
            f"{type(mixer).__name__} takes rewards of 0 to 1, but a domain's mean is {float(outside[0]):.4g}. "
            "Map rm_scores to a field that is, such as an accuracy.",
        )
