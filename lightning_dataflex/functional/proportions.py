"""Proportions (K,) of domains, float64: made of weights, kept above a floor, turned into whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_dataflex.functional.choices import check_choice

FloorMethod = Literal["water_filling", "mixture"]


def normalised(weights: Tensor) -> Tensor:
    """Weights >= 0 scaled to sum to 1; where all are 0, equal shares.

    Example:
        >>> normalised(torch.tensor([2.0, 1.0, 1.0]))
        tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """
    weights = weights.double()
    total = weights.sum()
    return weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))


def boltzmann(values: Tensor, temperature: float) -> Tensor:
    """Proportions in proportion to exp(v / T).

    Example:
        >>> boltzmann(torch.tensor([0.0, 1.0]), 1.0)
        tensor([0.2689, 0.7311], dtype=torch.float64)
    """
    return torch.softmax(values.double() / temperature, 0)


def optimistic(values: Tensor, otherwise: float = 0.0) -> Tensor:
    """The values, the largest of them in place of a NaN, or `otherwise` where there is no other.

    Example:
        >>> optimistic(torch.tensor([0.2, torch.nan, 0.5]))
        tensor([0.2000, 0.5000, 0.5000], dtype=torch.float64)
    """
    values = values.double()
    known = values[~values.isnan()]
    return torch.where(values.isnan(), known.max() if len(known) else otherwise, values)


def floored(proportions: Tensor, floor: float, method: FloorMethod = "water_filling") -> Tensor:
    """Proportions of which none is below the floor, still summing to 1.

    `water_filling` lifts those below the floor to it and takes what that needs from the others in proportion,
    again until none is below; `mixture` is `floor + (1 - K floor) p`, smooth and order-preserving. Raising to the floor
    and renormalising once, as is often done, ends below it.

    Raises:
        ValueError: K * floor > 1.

    Example:
        >>> floored(torch.tensor([0.9, 0.06, 0.04]), 0.055)
        tensor([0.8859, 0.0591, 0.0550], dtype=torch.float64)
        >>> floored(torch.tensor([0.98, 0.01, 0.01]), 0.05, "mixture")
        tensor([0.8830, 0.0585, 0.0585], dtype=torch.float64)
    """
    p, num = proportions.double(), len(proportions)
    check_floor(floor, num)
    if method == "mixture":
        return floor + (1 - num * floor) * p
    shares, low = p, torch.zeros_like(p, dtype=torch.bool)
    while ((short := p < floor * (1 - 1e-12)) & ~low).any():
        low = low | short
        rest = torch.where(low, 0.0, shares)
        p = torch.where(low, floor, rest / rest.sum() * (1 - int(low.sum()) * floor))
    return p


def check_floor(floor: float, num_domains: int) -> None:
    """Raise a ValueError for a floor that so many domains cannot all have."""
    if not floor >= 0 or num_domains * floor > 1 + 1e-12:
        raise ValueError(
            f"floor is {floor} for {num_domains} domains, which needs {num_domains * floor:g} of the prompts. "
            f"Use a floor of 0 to {1 / num_domains:g}."
        )


def check_method(method: str) -> None:
    """Raise a ValueError for a name that is no `FloorMethod`."""
    check_choice("floor_by", method, FloorMethod)


def matched(saved: Mapping[str, float], domains: Sequence[str]) -> dict[str, float]:
    """Proportions of other domains as those of these.

    A new one gets an equal share, the others what is left, in proportion. Those of the same domains are left as they
    are, to the last digit.

    Example:
        >>> matched({"a": 0.6, "b": 0.4}, ["b", "c"])
        {'b': 0.5, 'c': 0.5}
    """
    if set(saved) == set(domains):
        return {name: saved[name] for name in domains}
    fresh = 1 / len(domains)
    kept = sum(saved.get(name, 0.0) for name in domains)
    if not kept > 0:
        return dict.fromkeys(domains, fresh)
    rest = 1 - fresh * sum(name not in saved for name in domains)
    return {name: saved[name] / kept * rest if name in saved else fresh for name in domains}


def apportioned(proportions: Tensor, num: int, turn: int = 0, owed: Tensor | None = None) -> Tensor:
    """Whole numbers (K,) int64 that sum to `num`, by largest remainder; of equal ones each turn favours another.

    Args:
        proportions: (K,), summing to 1.
        num: How many there are to share out.
        turn: Number of the call; of equal remainders another is favoured each time.
        owed: (K,), each above -1, summing to 0: what each has got too little of so far. Given the rest of each time,
            the shares of many times together are the proportions; a domain with a small one would else never come up.

    Example:
        >>> apportioned(torch.tensor([0.5, 0.3, 0.2]), 7)
        tensor([4, 2, 1])
        >>> [apportioned(torch.tensor([0.5, 0.5]), 3, turn).tolist() for turn in range(2)]
        [[2, 1], [1, 2]]
    """
    quota = proportions.double() * num + (0.0 if owed is None else owed)
    whole = (quota + 1e-9).floor().clamp(min=0)
    # Rounded, so that remainders that are equal but for rounding are equal.
    remainder = (quota - whole).mul(1e9).round()
    order = torch.arange(len(quota)).roll(-turn)
    ranked = order[torch.argsort(remainder[order], descending=True, stable=True)]
    left = num - int(whole.sum())
    if left >= 0:
        whole[ranked[:left]] += 1
    else:
        whole[ranked[whole[ranked] > 0][left:]] -= 1
    return whole.long()
