"""Reweighters by the score, the length or the domain of a sample."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Normalize, Reweighter
from lightning_dataflex.core.checks import check_finite, check_range
from lightning_dataflex.core.ids import stable_ids
from lightning_dataflex.core.registry import register_reweighter
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional import shaping, weighting
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.functional.weighting import FLOAT_MAX


@register_reweighter("softmax")
class Softmax(Reweighter):
    """Weights in proportion to exp(s / temperature).

    Args:
        temperature: > 0; the smaller, the more the highest scores count.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> Softmax().act(torch.tensor([0.0, torch.nan, 1.0]), {})
        tensor([0.5379, 0.0000, 1.4621])
    """

    granularities = ("prompt", "response")

    def __init__(self, temperature: float = 1.0, normalize: Normalize = "tokens") -> None:
        super().__init__(normalize)
        check_range("temperature", temperature, 0, math.inf, open_low=True)
        self.temperature = temperature

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.softmax(scores, self.temperature)


@register_reweighter("difficulty_band")
class DifficultyBand(Reweighter):
    """Weights the samples between two quantiles of the scores `focus_weight` times as much as the others.

    On rewards of 0 and 1 the quantiles fall on the rewards themselves, so that the band holds all samples or
    one of the two outcomes: use a graded score.

    Args:
        low_q: Lower quantile, in [0, 1].
        high_q: Upper quantile, in [low_q, 1].
        focus_weight: >= 0.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> DifficultyBand().act(torch.tensor([0.0, 0.5, 0.5, 1.0]), {})
        tensor([0.6667, 1.3333, 1.3333, 0.6667])
    """

    granularities = ("prompt", "response")

    def __init__(
        self,
        low_q: float = 0.25,
        high_q: float = 0.75,
        focus_weight: float = 2.0,
        normalize: Normalize = "tokens",
    ) -> None:
        super().__init__(normalize)
        check_range("low_q", low_q, 0, 1)
        check_range("high_q", high_q, low_q, 1)
        check_range("focus_weight", focus_weight, 0, FLOAT_MAX)
        self.low_q, self.high_q, self.focus_weight = low_q, high_q, focus_weight

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.quantile_band(scores, self.low_q, self.high_q, self.focus_weight)


@register_reweighter("abs_advantage_power")
class AbsAdvantagePower(Reweighter):
    """Weights in proportion to s^alpha, |advantage|^alpha by default.

    DataFlex-RL calls it `per_advantage`. It is not prioritised experience replay; see `functional.weighting.power`.

    Args:
        alpha: >= 0; 0 weighs all alike.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> AbsAdvantagePower(alpha=0.5).act(torch.tensor([4.0, 1.0]), {})
        tensor([1.3333, 0.6667])
    """

    by_mask = True
    row_wise = True
    default_scorer = "advantage_magnitude"

    def __init__(self, alpha: float = 0.5, normalize: Normalize = "tokens") -> None:
        super().__init__(normalize)
        check_range("alpha", alpha, 0, math.inf)
        self.alpha = alpha

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.power(scores, self.alpha)


@register_reweighter("per_advantage")
class PerAdvantage(AbsAdvantagePower):
    """`abs_advantage_power` under the name that DataFlex-RL gives it.

    Args:
        alpha: >= 0; 0 weighs all alike.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> PerAdvantage(alpha=0.5).act(torch.tensor([4.0, 1.0]), {})
        tensor([1.3333, 0.6667])
    """


@register_reweighter("length_debias")
class LengthDebias(Reweighter):
    """Weights length^power.

    With power 1 a loss that takes the mean of each response (`seq-mean-token-mean`) becomes that over all tokens, which
    does not favour short right and long wrong answers. With power -1 and `normalize: tokens` a loss over all tokens
    (`token-mean`) becomes one in which each response counts alike.

    Args:
        power: 1 or -1, or between.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> LengthDebias().act(torch.tensor([3.0, 1.0]), {"response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])})
        tensor([1.5000, 0.5000])
    """

    granularities = ("prompt", "response")
    row_wise = True
    default_scorer = "response_length"
    paper = "Dr. GRPO, arXiv:2503.20783"

    def __init__(self, power: float = 1.0, normalize: Normalize = "samples") -> None:
        super().__init__(normalize)
        check_finite("power", power)
        self.power = power

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return shaping.length_power(batch.num_tokens, self.power)


@register_reweighter("domain_weight")
class DomainWeight(Reweighter):
    """Weights each sample by its domain.

    Args:
        weights: A number >= 0 for each domain by name.
        default: For a domain without a name there.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> rule = DomainWeight({"math": 3.0}, default=1.0)
        >>> rule.act(torch.zeros(2), {"domain": ["math", "code"], "response_mask": torch.ones(2, 1)})
        tensor([1.5000, 0.5000])
    """

    requires = ("domain",)
    granularities = ("prompt", "response")
    row_wise = True
    default_scorer = "response_length"

    def __init__(self, weights: dict[str, float], default: float = 1.0, normalize: Normalize = "tokens") -> None:
        super().__init__(normalize)
        if not isinstance(weights, dict) or not weights:
            raise ValueError(f"weights is {shown(weights)}. Give a mapping of domains to numbers.")
        for name, weight in {**weights, "default": default}.items():
            check_range(f"the weight of {name}", weight, 0, FLOAT_MAX)
        self.weights, self.default = dict(weights), default

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        ids = stable_ids(batch["domain"], "domain").cpu()
        result = torch.full((len(ids),), float(self.default))
        for name, weight in self.weights.items():
            # A configuration has texts where the data may have whole numbers.
            names = [name, int(name)] if re.fullmatch(r"-?\d+", str(name)) else [name]
            result[torch.isin(ids, stable_ids(names))] = weight
        return result.to(scores.device)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"domain": stable_ids(batch.original("domain"), "domain")}
