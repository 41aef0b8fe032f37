"""Which prompts a batch is made of: how many of each domain, and which of them."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from lightning_dataflex.core.checks import listed
from lightning_dataflex.functional.proportions import apportioned

Draw = Literal["largest_remainder", "multinomial"]


@dataclass
class Position:
    """How far an epoch has come: all that the next batch follows from, beside the proportions.

    Attributes:
        epoch: The epoch.
        batch: Batches drawn in it.
        drawn: Prompts drawn of each domain in it.
        owed: What each domain has got too little of, in parts of a prompt, because batches are whole.
    """

    epoch: int
    batch: int = 0
    drawn: list[int] = field(default_factory=list)
    owed: list[float] = field(default_factory=list)


class Dealer:
    """Deals batches of prompts by proportions; what it deals follows from its arguments and those of `batch`.

    Args:
        rows: Of each domain, the rows of its prompts.
        domains: Their names.
        draw: See `DomainMixtureSampler`, as the rest.
        replacement: Whether a domain starts anew when it is used up.
        seed: Decides all draws.
    """

    def __init__(
        self, rows: Sequence[np.ndarray], domains: Sequence[str], *, draw: Draw, replacement: bool, seed: int
    ) -> None:
        self.rows, self.domains = rows, domains
        self.draw, self.replacement, self.seed = draw, replacement, seed
        self._orders: dict[int, tuple[tuple[int, int], np.ndarray]] = {}
        self._has_warned = False

    def batch(self, here: Position, proportions: list[float], num: int) -> tuple[list[int], Position]:
        """The rows of a batch of `num` prompts, or of what is left, and where the next one starts."""
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, here.epoch, here.batch])))
        counts, owed = self._counts(proportions, num, here, rng)
        rows = [
            self._row(here.epoch, domain, here.drawn[domain] + i) for domain, n in enumerate(counts) for i in range(n)
        ]
        drawn = [before + count for before, count in zip(here.drawn, counts)]
        return [rows[i] for i in rng.permutation(len(rows))], Position(here.epoch, here.batch + 1, drawn, owed)

    def _counts(
        self, proportions: list[float], num: int, here: Position, rng: np.random.Generator
    ) -> tuple[list[int], list[float]]:
        """How many prompts each domain gives to a batch of `num`, or of what is left; and what is owed afterwards."""
        most = [
            0 if not len(rows) else num if self.replacement else max(0, len(rows) - drawn)
            for rows, drawn in zip(self.rows, here.drawn)
        ]
        share = torch.tensor(proportions, dtype=torch.float64)
        there = self._open(share, most, [0] * len(most))
        owed = self._owed(there, here)
        counts = self._apportioned(there, num, here, owed, rng)
        if all(count <= limit for count, limit in zip(counts, most)):
            if (there == 0)[share > 0].any():
                self._warn_of_empty(share, most)
            rest = there * num + owed - torch.tensor(counts) if self.draw == "largest_remainder" else owed
            return counts, rest.tolist()
        counts = [min(count, limit) for count, limit in zip(counts, most)]
        self._warn_of_empty(share, [limit - count for count, limit in zip(counts, most)])
        while missing := min(num, sum(most)) - sum(counts):
            more = self._apportioned(self._open(share, most, counts), missing, here, None, rng)
            counts = [min(count + extra, limit) for count, extra, limit in zip(counts, more, most)]
        return counts, [0.0] * len(counts)

    def _open(self, share: torch.Tensor, most: list[int], counts: list[int]) -> torch.Tensor:
        """The shares of the domains that have prompts left, scaled to sum to 1; if those have none, of what is left."""
        left = torch.tensor([limit - count for limit, count in zip(most, counts)])
        there = torch.where(left > 0, share, 0.0)
        return there / there.sum() if there.sum() > 0 else left.double() / left.sum().clamp(min=1)

    def _owed(self, share: torch.Tensor, here: Position) -> torch.Tensor:
        """What is owed, to the domains that are in the mixture now; it sums to 0 over them."""
        owed = torch.where(share > 0, torch.tensor(here.owed, dtype=torch.float64), 0.0)
        return torch.where(share > 0, owed - owed.sum() / (share > 0).sum(), 0.0)

    def _apportioned(
        self, share: torch.Tensor, num: int, here: Position, owed: torch.Tensor | None, rng: np.random.Generator
    ) -> list[int]:
        if self.draw == "multinomial":
            return rng.multinomial(num, share.numpy() / share.numpy().sum()).tolist()
        return apportioned(share, num, here.batch, owed).tolist()

    def _row(self, epoch: int, domain: int, place: int) -> int:
        """The prompt at this place of the domain's order in this epoch; each time around it is another order."""
        rows = self.rows[domain]
        key = (epoch, place // len(rows))
        if self._orders.get(domain, (None, None))[0] != key:
            seed = np.random.SeedSequence([self.seed, epoch, domain, key[1], 1])
            self._orders[domain] = (key, np.random.Generator(np.random.Philox(seed)).permutation(len(rows)))
        return int(rows[self._orders[domain][1][place % len(rows)]])

    def _warn_of_empty(self, share: torch.Tensor, left: list[int]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        names = [name for name, p, n in zip(self.domains, share.tolist(), left) if p > 0 and n <= 0]
        cure = "Leave them out." if self.replacement else "Use replacement=True to start a domain anew."
        warnings.warn(
            f"The domains {listed(names)} have no prompts left in this epoch. Their share goes to the others in "
            f"proportion. {cure}",
            stacklevel=2,
        )


def rows_by_domain(
    labels: Sequence[Hashable] | np.ndarray | torch.Tensor, domains: Sequence[str] | None = None
) -> tuple[list[np.ndarray], list[str]]:
    """The rows (n_k,) of each domain, and the domains.

    Example:
        >>> rows_by_domain(["b", "a", "b"])
        ([array([1]), array([0, 2])], ['a', 'b'])
    """
    if not len(labels):
        raise ValueError("There are no prompts. Give the domain of each prompt of the dataset.")
    if isinstance(labels, torch.Tensor):
        labels = labels.numpy()
    if isinstance(labels, np.ndarray) and labels.dtype != object:
        found, index = np.unique(labels, return_inverse=True)
        names = [str(name) for name in found]
    else:
        places: dict[str, int] = {}
        texts = (str(label.item() if isinstance(label, torch.Tensor) else label) for label in labels)
        index = np.fromiter((places.setdefault(text, len(places)) for text in texts), np.int64, len(labels))
        names = list(places)
        if {"None", "nan"} & places.keys():
            _check_all_named(labels)
    domains = sorted(names) if domains is None else [str(name) for name in domains]
    if len(set(domains)) < len(domains):
        raise ValueError(f"domains is {domains}, which names one twice. Name each once.")
    unknown = [name for name in names if name not in domains]
    if unknown:
        raise ValueError(
            f"The dataset has prompts of the domains {listed(unknown)}, which are none of {listed(domains)}. "
            "Name all of them, or leave domains out to take them from the data."
        )
    order = np.argsort(index, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(index, minlength=len(names)))[:-1])
    rows = dict(zip(names, parts))
    return [rows.get(name, np.empty(0, np.int64)) for name in domains], domains


def _check_all_named(labels: Iterable[Any]) -> None:
    for row, label in enumerate(labels):
        if label is None or label != label:
            raise ValueError(f"The domain of prompt {row} is {label}. Give every prompt its domain.")
