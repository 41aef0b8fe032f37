"""Mixers that look at a window of steps: of each domain its mean, its slope, its count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.checks import check_finite, check_range, check_whole
from lightning_dataflex.core.domains import DomainStats, prior
from lightning_dataflex.core.mixer import Mixer
from lightning_dataflex.core.registry import register_mixer
from lightning_dataflex.functional import mixing
from lightning_dataflex.functional.proportions import FloorMethod, boltzmann, normalised, optimistic
from lightning_dataflex.mixers.base import Floored


@register_mixer("static")
class Static(Mixer):
    """The same proportions throughout: a baseline, and how a mixture is set by hand.

    Args:
        proportions: Weights >= 0 by domain, or in the order of the domains; scaled to sum to 1. Default: all alike.

    Example:
        >>> mixer = Static({"math": 3, "code": 1})
        >>> mixer.bind(["code", "math"])
        >>> mixer.act({}, None)
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    needs_data = False

    def __init__(self, proportions: dict[str, float] | list[float] | None = None) -> None:
        self.given = proportions

    def bind(self, domains: Sequence[str]) -> None:
        super().bind(domains)
        self.fixed = prior(domains, self.given)

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        return self.fixed


@register_mixer("reward_gap")
class RewardGap(Floored):
    """softmax of how far each domain's mean reward is below the best: the worst domain gets most, solvable or not.

    Args:
        temperature: > 0.
        floor: Least proportion of a domain.
        floor_by: `water_filling` or `mixture`.
        window: Steps that the mean is taken over.
    """

    signals = ("reward",)

    def __init__(
        self,
        temperature: float = 1.0,
        floor: float = 0.05,
        floor_by: FloorMethod = "water_filling",
        window: int = 50,
    ) -> None:
        super().__init__(floor, floor_by, window)
        check_range("temperature", temperature, 0, math.inf, open_low=True)
        self.temperature = temperature

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        return self.floored(mixing.reward_gap(ctx["stats"].mean, self.temperature))


@register_mixer("dump_ucb")
class DumpUCB(Floored):
    """softmax of mean |advantage| plus a bonus for domains that were seen little: each is an arm of a bandit.

    |advantage| is largest at medium difficulty and near 0 for what is mastered or impossible.

    Args:
        temperature: > 0; the paper's is 0.1.
        c: Factor on the bonus; the paper's is 1.
        floor: Least proportion of a domain; the paper has none.
        floor_by: `water_filling` or `mixture`.
        window: Steps that the mean is taken over. The paper counts 300 rollouts.
    """

    signals = ("advantage",)
    default_scorer = "advantage_magnitude"
    paper = "DUMP, arXiv:2504.09710"

    def __init__(
        self,
        temperature: float = 0.1,
        c: float = 1.0,
        floor: float = 0.05,
        floor_by: FloorMethod = "water_filling",
        window: int = 50,
    ) -> None:
        super().__init__(floor, floor_by, window)
        check_range("temperature", temperature, 0, math.inf, open_low=True)
        check_range("c", c, 0, math.inf)
        check_finite("c", c)
        self.temperature, self.c = temperature, c

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        stats: DomainStats = ctx["stats"]
        bound = mixing.upper_confidence_bound(stats.mean, stats.count, self.c)
        return self.floored(boltzmann(bound, self.temperature))


@register_mixer("tscl")
class TSCL(Floored):
    """softmax of the slope of each domain's reward over training steps: what is being learned, or forgotten.

    Args:
        temperature: > 0, in reward per step. The authors' 0.0004 is for slopes of single tasks over hundreds of steps.
        floor: Least proportion of a domain.
        signed: True follows improvement alone; False, as the paper, forgetting too.
        floor_by: `water_filling` or `mixture`.
        window: Steps that the slope is fitted to. A domain with fewer than two has a slope of 1.
    """

    signals = ("reward",)
    paper = "TSCL, arXiv:1707.00183"

    def __init__(
        self,
        temperature: float = 0.01,
        floor: float = 0.05,
        signed: bool = False,
        floor_by: FloorMethod = "water_filling",
        window: int = 20,
    ) -> None:
        super().__init__(floor, floor_by, window)
        check_range("temperature", temperature, 0, math.inf, open_low=True)
        check_whole("window", window, 2)
        self.temperature, self.signed = temperature, signed

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        slope = torch.nan_to_num(ctx["stats"].slope, nan=1.0)
        return self.floored(boltzmann(slope if self.signed else slope.abs(), self.temperature))


@register_mixer("vcrl")
class VCRL(Floored):
    """In proportion to the variance of the rewards within groups: most for domains of medium difficulty.

    The paper keeps prompts whose variance is high; here the same signal sets proportions. A domain without data counts
    as the one with the highest variance.

    Args:
        floor: Least proportion of a domain.
        floor_by: `water_filling` or `mixture`.
        window: Steps that the variance is averaged over.
    """

    signals = ("variance",)
    default_scorer = "group_reward_variance"
    paper = "VCRL, arXiv:2509.19803"

    def __init__(self, floor: float = 0.05, floor_by: FloorMethod = "water_filling", window: int = 50) -> None:
        super().__init__(floor, floor_by, window)

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        return self.floored(normalised(optimistic(ctx["stats"].mean, otherwise=1.0)))


@register_mixer("plr")
class PLR(Floored):
    """By the rank of mean |advantage|, with a part for domains that were not seen for long.

    Args:
        beta: > 0; small favours the highest rank.
        rho: In [0, 1], the share that follows staleness.
        floor: Least proportion of a domain; the paper has none.
        floor_by: `water_filling` or `mixture`.
        window: Steps that the mean is taken over; the paper's is 1.
    """

    signals = ("advantage",)
    default_scorer = "advantage_magnitude"
    paper = "PLR, arXiv:2010.03934"

    def __init__(
        self,
        beta: float = 0.1,
        rho: float = 0.1,
        floor: float = 0.0,
        floor_by: FloorMethod = "water_filling",
        window: int = 1,
    ) -> None:
        super().__init__(floor, floor_by, window)
        check_range("beta", beta, 0, math.inf, open_low=True)
        check_range("rho", rho, 0, 1)
        self.beta, self.rho = beta, rho

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Tensor:
        stats: DomainStats = ctx["stats"]
        return self.floored(mixing.rank_prioritised(stats.mean, stats.staleness, self.beta, self.rho))
