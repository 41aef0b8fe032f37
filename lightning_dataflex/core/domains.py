"""What is known of each domain: windows of steps of a scorer's mean, counts, staleness, variance and slope."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.checks import check_whole, is_number, listed
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional import mixing
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.functional.proportions import normalised


@dataclass(frozen=True)
class DomainSums:
    """Sums over the scored samples of a step, by domain: they add up over ranks and batches.

    Attributes:
        count: (K,) scored samples.
        total: (K,) sum of their scores.
        squares: (K,) sum of the squares of their scores.
    """

    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, scores: Tensor, domain: Tensor, num_domains: int) -> DomainSums:
        """The sums of scores (N,) of samples of these domains (N,); a NaN score is no data.

        Example:
            >>> DomainSums.of(torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([0, 0, 1]), 2).mean
            tensor([0.5000,    nan], dtype=torch.float64)
        """
        scores, domain = scores.double().cpu(), domain.long().cpu()
        known = scores.isfinite()
        exact = torch.where(known, scores, 0.0)
        sums = torch.zeros(3, num_domains, dtype=torch.float64)
        return cls(*sums.index_add_(1, domain, torch.stack([known.double(), exact, exact.square()])))

    def __add__(self, other: DomainSums) -> DomainSums:
        return DomainSums(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        """(K,) mean score; NaN of a domain without data."""
        return self.total / self.count


@dataclass
class DomainStats:
    """The last steps of every domain.

    Args:
        domains: Their names.
        window: Steps that are remembered of each domain, those in which it had a score.

    Example:
        >>> stats = DomainStats(["math", "code"], window=10)
        >>> stats.add(0, DomainSums.of(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), 2))
        >>> stats.add(3, DomainSums.of(torch.tensor([1.0]), torch.tensor([0]), 2))
        >>> stats.mean.tolist(), stats.count.tolist(), stats.staleness.tolist()
        ([0.6666666666666666, nan], [3.0, 0.0], [0.0, 4.0])
    """

    domains: Sequence[str]
    window: int = 50
    step: int = -1
    """The last step that was added."""
    count: Tensor = field(init=False)
    """(K,) scored samples since the start."""
    last_seen: Tensor = field(init=False)
    """(K,) the last step with a scored sample; -1 before the first."""
    history: dict[str, deque[tuple[int, float, float, float]]] = field(init=False)
    """Of each domain, step, count, sum and sum of squares."""

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1)
        self.count = torch.zeros(len(self.domains), dtype=torch.float64)
        self.last_seen = torch.full((len(self.domains),), -1, dtype=torch.int64)
        self.history = {name: deque(maxlen=self.window) for name in self.domains}

    def add(self, step: int, sums: DomainSums) -> None:
        """One step's sums; those of a step that was added before are added to it."""
        self.step = max(self.step, step)
        self.count += sums.count
        for i, name in enumerate(self.domains):
            row = (float(sums.count[i]), float(sums.total[i]), float(sums.squares[i]))
            if not row[0]:
                continue
            history = self.history[name]
            if history and history[-1][0] == step:
                _, *before = history.pop()
                row = tuple(old + new for old, new in zip(before, row))  # type: ignore[assignment]
            history.append((step, *row))
            self.last_seen[i] = step

    @property
    def mean(self) -> Tensor:
        """(K,) mean score of the samples in the window; NaN of a domain without data."""
        return self._per_domain(lambda count, total, squares: total / count)

    @property
    def variance(self) -> Tensor:
        """(K,) population variance of the scores in the window; NaN of a domain without data."""
        return self._per_domain(lambda count, total, squares: max(squares / count - (total / count) ** 2, 0.0))

    @property
    def slope(self) -> Tensor:
        """(K,) change of the mean score per training step over the window; NaN of fewer than two steps with data."""
        return torch.tensor([self._slope(name) for name in self.domains], dtype=torch.float64)

    @property
    def staleness(self) -> Tensor:
        """(K,) steps since a domain was last seen; since the start, of one that never was."""
        return (self.step - self.last_seen).double()

    def scores(self) -> dict[str, float]:
        """The window means by name, of the domains that have data."""
        return {name: float(mean) for name, mean in zip(self.domains, self.mean) if not mean.isnan()}

    def state_dict(self) -> dict[str, Any]:
        """By name, so that a run with other domains finds those that it knows."""
        return {
            "step": self.step,
            "domains": {
                name: {
                    "count": float(self.count[i]),
                    "last_seen": int(self.last_seen[i]),
                    "history": torch.tensor([list(row) for row in self.history[name]], dtype=torch.float64),
                }
                for i, name in enumerate(self.domains)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, by name; what has no match is dropped, or starts anew."""
        self.step = state["step"]
        for i, name in enumerate(self.domains):
            saved = state["domains"].get(name)
            if saved is not None:
                self.count[i], self.last_seen[i] = saved["count"], saved["last_seen"]
                rows = [(int(step), *row) for step, *row in saved["history"].reshape(-1, 4).tolist()]
                self.history[name] = deque(rows, maxlen=self.window)

    def _slope(self, name: str) -> float:
        rows = self.history[name]
        steps = torch.tensor([row[0] for row in rows])
        return mixing.slope(steps, torch.tensor([row[2] / row[1] for row in rows], dtype=torch.float64))

    def _per_domain(self, of: Any) -> Tensor:
        values = []
        for name in self.domains:
            count, total, squares = (sum(column) for column in list(zip(*self.history[name]))[1:] or [(0.0,)] * 3)
            values.append(of(count, total, squares) if count else math.nan)
        return torch.tensor(values, dtype=torch.float64)


def warn_of_other_domains(owner: object, saved: Mapping[str, Any], domains: Sequence[str]) -> None:
    """Warn of domains of a checkpoint that are no more, and of new ones."""
    known = set(domains)
    gone, new = [name for name in saved if name not in known], [name for name in domains if name not in saved]
    if gone or new:
        warn_once(
            owner,
            f"The checkpoint has the domains {listed(saved)}. What it knows of {listed(gone)} is "
            f"dropped; {listed(new)} start without data.",
        )


def of_domains(values: Mapping[str, Any], domains: Sequence[str]) -> dict[str, Any]:
    """The values of these domains, of those that have one.

    Example:
        >>> of_domains({"math": 1.0, "gone": 2.0}, ["code", "math"])
        {'math': 1.0}
    """
    return {name: values[name] for name in domains if name in values}


def prior(
    domains: Sequence[str], weights: Mapping[str, float] | Sequence[float] | None, what: str = "proportions"
) -> Tensor:
    """Weights by domain, or in the order of the domains, as proportions (K,); equal shares without weights.

    Raises:
        ValueError: A domain is unknown, a weight negative or no number, or all are 0.

    Example:
        >>> prior(["math", "code"], {"code": 3, "math": 1})
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    if weights is None:
        return torch.full((len(domains),), 1 / len(domains), dtype=torch.float64)
    if isinstance(weights, Mapping):
        check_names(what, list(weights), domains)
        weights = [weights[name] for name in domains]
    elif len(weights) != len(domains):
        raise ValueError(
            f"{what} has {len(weights)} numbers for {len(domains)} domains ({listed(domains)}). "
            "Give one for each, or name them."
        )
    if not all(is_number(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(f"{what} is {shown(weights)}. Give numbers >= 0 that are not all 0.")
    return normalised(torch.tensor([float(weight) for weight in weights], dtype=torch.float64))


def check_names(what: str, names: Sequence[str], domains: Sequence[str]) -> None:
    """Raise a ValueError unless the names are those of the domains."""
    if len(set(names)) < len(names):
        raise ValueError(f"{what} is {listed(names)}, which names a domain twice. Name each once.")
    named, known = set(names), set(domains)
    unknown = [name for name in names if name not in known]
    missing = [name for name in domains if name not in named]
    if unknown or missing:
        raise ValueError(
            f"{what} names {listed(unknown) if unknown else 'no'} unknown and lacks {listed(missing)} of "
            f"the domains. They are {listed(domains)}: name each of them."
        )
