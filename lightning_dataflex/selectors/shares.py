"""Selectors of a share of the batch: the best, the nearest, or drawn by chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.checks import check_finite, check_range
from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional import selection, visits


@register_selector("topk_fraction")
class TopKFraction(Selector):
    """Keeps the share of samples with the largest (or smallest) scores; of equal scores the earlier sample.

    Args:
        fraction: In (0, 1], of the samples with a score; rounded to nearest, halves up, at least one.
        largest: False keeps the smallest.

    Example:
        >>> import torch
        >>> TopKFraction(fraction=0.5).act(torch.tensor([0.1, 0.3, 0.9, 0.3]), {})
        [1, 2]
    """

    granularities = ("prompt", "response")

    def __init__(self, fraction: float = 0.5, largest: bool = True) -> None:
        check_range("fraction", fraction, 0, 1, open_low=True)
        self.fraction, self.largest = fraction, largest

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        return selection.top_fraction(scores, self.fraction, largest=self.largest)


@register_selector("nearest")
class Nearest(Selector):
    """Keeps what scores nearest to a target, prompts before their rollout and samples after it; of equals the earlier.

    Args:
        target: The score to be near to.
        fraction: In (0, 1], of what has a score. Before a rollout it is not read: the step says how many it needs.

    Example:
        >>> import torch
        >>> Nearest(0.5, fraction=0.5).act(torch.tensor([0.9, 0.55, 0.2, 0.48]), {})
        [1, 3]
    """

    granularities = ("prompt", "response")
    paper = "MoPPS, arXiv:2507.04632"

    def __init__(self, target: float = 0.5, fraction: float = 0.5) -> None:
        check_range("fraction", fraction, 0, 1, open_low=True)
        check_finite("target", target)
        self.target, self.fraction = target, fraction

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        num = ctx.get("num")
        if num is None:
            num = int(selection.share(torch.tensor(len(scores)), self.fraction))
        return selection.nearest_to(scores, self.target, num)


@register_selector("bernoulli")
class Bernoulli(Selector):
    """Keeps each prompt with the probability that is its score, all of its samples or none.

    The draw follows from the seed, the step and the prompt's id alone.

    Args:
        seed: Of the draws.

    Example:
        >>> import torch
        >>> Bernoulli().act(torch.tensor([1.0, 0.0, 1.0]), {"uid": [7, 8, 9]})
        [0, 2]
    """

    requires = ("prompt_id",)
    granularities = ("prompt",)
    row_wise = True
    paper = "GRESO, arXiv:2506.02177"

    def __init__(self, seed: int = 0) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}. Use 0 or a positive number.")
        self.seed = seed

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        drawn = visits.uniform(prompt_ids(batch), self.seed, ctx.get("step_id", 0))
        return drawn.to(scores.device) < scores

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"prompt_id": prompt_ids(batch)}
