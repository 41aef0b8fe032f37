"""Mixer: what turns the scores of domains into the proportions of the prompts to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Actuator
from lightning_dataflex.core.domains import DomainStats, DomainSums


class Mixer(Actuator):
    """Scores of domains to the proportion that each has among the prompts to come.

    A subclass's `act` gets the mean score of each domain that has data, `{"math": 0.7}`, and returns the proportions,
    an array in the order of `self.domains` or a dict. Its context has `counts`, the samples of each domain so far,
    `stats`, a `DomainStats` with windows, variances and slopes, `proportions`, those in force, `step_id`, and
    `progress`, the share of the run that is over, where that is known.

    Example:
        >>> class Worst(Mixer):
        ...     def act(self, scores, batch, **ctx):
        ...         return {name: float(scores[name] == min(scores.values())) for name in self.domains}
        >>> mixer = Worst()
        >>> mixer.bind(["math", "code"])
        >>> stats = DomainStats(mixer.domains)
        >>> stats.add(0, DomainSums.of(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), 2))
        >>> mixer.proportions(stats)
        tensor([0., 1.], dtype=torch.float64)
    """

    granularities = ("domain", "prompt", "response", "token")
    default_scorer = "reward_difficulty"
    needs_data: ClassVar[bool] = True
    """Whether the rule has nothing to say before the first step."""
    window: int = 50
    """Steps of each domain that the scores are the mean of."""
    domains: Sequence[str] = ()

    def bind(self, domains: Sequence[str]) -> None:
        """Tell the rule which domains there are, in order, before the first step.

        Raises:
            ValueError: It cannot serve so many, or not these.
        """
        if self.domains and list(self.domains) != list(domains):
            raise ValueError(
                f"{type(self).__name__} was made for the domains {', '.join(self.domains)}, but the data has "
                f"{', '.join(domains)}. Give it those, in that order."
            )
        self.domains = list(domains)

    def observe(self, sums: DomainSums, proportions: Tensor) -> None:
        """See one step's sums, drawn by these proportions (K,); for rules that remember more than the window."""

    def proportions(self, stats: DomainStats, **ctx: Any) -> Tensor:
        """What `act` says as proportions (K,) float64 that sum to 1.

        Raises:
            ValueError: They are not numbers >= 0 that sum to 1, one for each domain.
        """
        counts = dict(zip(self.domains, stats.count.tolist()))
        given = self.act(stats.scores(), None, counts=counts, stats=stats, **ctx)
        named = given if isinstance(given, Mapping) else {}
        if named:
            given = [named.get(name, 0.0) for name in self.domains]
        try:
            result = torch.as_tensor(given, dtype=torch.float64).flatten()
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{type(self).__name__}.act returned {given!r}. Return proportions, as an array, a list or a dict."
            ) from None
        # What rounding leaves below 0 is 0.
        result = torch.where((result < 0) & (result > -1e-9), 0.0, result)
        total = float(result.sum())
        if (
            set(named) - set(self.domains)
            or len(result) != len(self.domains)
            or not (result >= 0).all()
            or not abs(total - 1) < 1e-5
        ):
            raise ValueError(
                f"{type(self).__name__}.act returned {named or result.tolist()} for {len(self.domains)} domains. "
                "Return a proportion >= 0 for each; they must sum to 1."
            )
        return result / total
