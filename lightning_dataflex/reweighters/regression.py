"""Reweighters of likelihoods: regression on responses by what they were worth."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_dataflex.core.actuator import Normalize, Reweighter
from lightning_dataflex.core.checks import check_range
from lightning_dataflex.core.registry import register_reweighter
from lightning_dataflex.functional import shaping
from lightning_dataflex.functional.weighting import FLOAT_MAX


@register_reweighter("rwr")
class RWR(Reweighter):
    """Weights exp(reward / beta), with a mean of 1 over the samples: reward-weighted regression.

    The rule weighs a likelihood. On a policy gradient, whose terms hold the advantage already, rewards count twice.

    Args:
        beta: > 0; the smaller, the more the best rewards count.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> RWR(beta=0.5).act(torch.tensor([0.0, 1.0, 1.0]), {})
        tensor([0.1901, 1.4049, 1.4049])
    """

    granularities = ("prompt", "response")
    default_scorer = "outcome"
    paper = "Reward-weighted regression, Peters and Schaal 2007"

    def __init__(self, beta: float = 1.0, normalize: Normalize = "samples") -> None:
        super().__init__(normalize)
        check_range("beta", beta, 0, math.inf, open_low=True)
        self.beta = beta

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return shaping.exp_reward(scores, self.beta)


@register_reweighter("awr")
class AWR(Reweighter):
    """Weights exp(A' / temperature), at most `clip`, of advantages A' that are normalised over the batch.

    The rule weighs a likelihood. On a policy gradient, whose terms hold the advantage already, advantages count twice.

    Args:
        temperature: > 0.
        clip: The largest weight.
        normalize: `none`, as in the authors' code, `tokens`, `samples` or `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> AWR().act(torch.tensor([-1.0, 0.0, 1.0, 4.0]), {})
        tensor([0.3433, 0.5860, 1.0000, 4.9707])
    """

    granularities = ("response",)
    default_scorer = "advantage"
    paper = "AWR, arXiv:1910.00177"

    def __init__(self, temperature: float = 1.0, clip: float = 20.0, normalize: Normalize = "none") -> None:
        super().__init__(normalize)
        check_range("temperature", temperature, 0, math.inf, open_low=True)
        check_range("clip", clip, 0, FLOAT_MAX, open_low=True)
        self.temperature, self.clip = temperature, clip

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return shaping.exp_advantage(scores, self.temperature, self.clip)
