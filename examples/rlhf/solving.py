"""Solve rates per domain, counted over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

SOLVED = 1 - 1e-6
"""A verifier's score from which on a response counts as right."""


@dataclass
class SolveRates:
    """How many samples there were and how many were right, per domain.

    The counts have one entry for every domain of the run, so that ranks that saw different domains can add theirs.

    Example:
        >>> rates = SolveRates.of(["copy", "sorting"], ["copy", "copy"], torch.tensor([1.0, 0.0]))
        >>> rates.overall, rates.per_domain
        (0.5, {'copy': 0.5})
    """

    domains: Sequence[str]
    counts: Tensor
    """(2, K): samples, and right ones."""

    @classmethod
    def of(cls, domains: Sequence[str], domain: Sequence[str], solved: Tensor) -> SolveRates:
        index = torch.tensor([domains.index(name) for name in domain], dtype=torch.int64, device=solved.device)
        # Counts are 32-bit whatever the Trainer's precision: bfloat16 cannot count beyond 256.
        right = solved.to(torch.float32)
        counts = torch.zeros(2, len(domains), dtype=torch.float32, device=solved.device)
        return cls(domains, counts.index_add_(1, index, torch.stack([torch.ones_like(right), right])))

    def __add__(self, other: SolveRates) -> SolveRates:
        return SolveRates(self.domains, self.counts + other.counts)

    def over_ranks(self, strategy: Strategy) -> SolveRates:
        """The counts of all ranks together. A collective: every rank must call it."""
        return SolveRates(self.domains, strategy.reduce(self.counts, reduce_op="sum"))

    @property
    def overall(self) -> float:
        samples, right = self.counts.sum(1).tolist()
        return right / max(samples, 1.0)

    @property
    def per_domain(self) -> dict[str, float]:
        """Of the domains that occurred."""
        return {name: right / n for name, n, right in zip(self.domains, *self.counts.tolist()) if n}
