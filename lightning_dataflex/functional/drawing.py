"""Which samples are drawn, and by what chance."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_dataflex.functional.selection import top
from lightning_dataflex.functional.visits import uniform


def drawn(log_chances: Tensor, num: int, ids: Tensor, *key: int) -> Tensor:
    """(N,) bool: `num` samples drawn without replacement, each in proportion to exp(log_chances) of those left.

    The draw follows from the key and the ids alone, whatever the order of the samples.

    Source: Gumbel top-k, Kool et al. 2019, arXiv:1903.06059.

    Args:
        log_chances: (N,); -inf and NaN are never drawn.
        num: How many, at most.
        ids: (N,) distinct integers.
        key: Seed and step.

    Example:
        >>> drawn(torch.tensor([0.0, -torch.inf, 0.0]), 2, torch.arange(3), 0)
        tensor([ True, False,  True])
    """
    gumbel = -(-uniform(ids, *key).log()).log()
    order = torch.where(log_chances.isnan().cpu(), -torch.inf, log_chances.double().cpu() + gumbel)
    return (top(order, num) & (order > -torch.inf)).to(log_chances.device)


def rank_power(num: int, keep: float) -> Tensor:
    """Chance of each of `num` samples by the rank of its loss, the smallest first, (num,) float64, sum 1.

    ((r + 1/2) / num)^(1 / keep - 1).

    Source: selective backpropagation, Jiang et al. 2019, arXiv:1910.00762, as Composer implements it.

    Args:
        keep: In (0, 1), the share that is kept.

    Example:
        >>> rank_power(4, 0.5)
        tensor([0.0625, 0.1875, 0.3125, 0.4375], dtype=torch.float64)
    """
    chances = ((torch.arange(num, dtype=torch.float64) + 0.5) / num) ** (1 / keep - 1)
    return chances / chances.sum()


def in_schedule(progress: float, batch: int, start: float, end: float, interrupt: int) -> bool:
    """Whether a rule acts: start <= progress < end, and not in every `interrupt`-th batch (0: in all).

    Source: selective backpropagation in Composer.

    Example:
        >>> in_schedule(0.5, 0, 0.5, 0.9, 2), in_schedule(0.5, 1, 0.5, 0.9, 2), in_schedule(0.9, 0, 0.5, 0.9, 2)
        (True, False, False)
    """
    return start <= progress < end and (interrupt == 0 or (batch + 1) % interrupt != 0)


def nearness(rates: Tensor, target: float = 0.5, temperature: float = 1e-3) -> Tensor:
    """Chance of each prompt, softmax(-|rate - target| / temperature), (N,) float64, sum 1; 0 for NaN.

    Source: DOTS, Sun et al. 2025, arXiv:2506.05316, with its predicted or any other pass rate.

    Example:
        >>> nearness(torch.tensor([0.1, 0.45, 0.5, 0.9]), 0.5, 0.1)
        tensor([0.0111, 0.3691, 0.6086, 0.0111], dtype=torch.float64)
    """
    return torch.softmax(log_nearness(rates, target, temperature), 0).nan_to_num(0.0)


def log_nearness(rates: Tensor, target: float, temperature: float) -> Tensor:
    """-|rate - target| / temperature, (N,) float64; -inf for NaN. See `nearness`."""
    return (-(rates.double() - target).abs() / temperature).nan_to_num(nan=-torch.inf)


def prioritized(errors: Tensor, alpha: float, *, by: Literal["size", "rank"] = "size", eps: float = 1e-6) -> Tensor:
    """Chance of each sample, in proportion to (|error| + eps)^alpha, or to (1 / rank)^alpha, (N,) float64, sum 1.

    Source: prioritised experience replay, Schaul et al. 2016, arXiv:1511.05952, equation 1.

    Example:
        >>> prioritized(torch.tensor([0.5, -1.0, 2.0]), 0.7, by="rank")
        tensor([0.2229, 0.2961, 0.4810], dtype=torch.float64)
    """
    size = errors.double().abs()
    if by == "rank":
        rank = torch.empty_like(size)
        rank[torch.argsort(size, descending=True, stable=True)] = torch.arange(1.0, len(size) + 1, dtype=size.dtype)
        chances = rank**-alpha
    else:
        chances = (size + eps) ** alpha
    return chances / chances.sum()


def priority_correction(chances: Tensor, beta: float) -> Tensor:
    """(N P)^-beta over its maximum: what a draw by `prioritized` has to be weighted with, (N,).

    Source: prioritised experience replay, Schaul et al. 2016, arXiv:1511.05952, section 3.4.

    Example:
        >>> priority_correction(torch.tensor([0.25, 0.75]), 1.0)
        tensor([1.0000, 0.3333])
    """
    weights = (len(chances) * chances) ** -beta
    return weights / weights.max()


def solve_chance(solved: Tensor, num: Tensor) -> Tensor:
    """Posterior mean of a prompt's solve rate after `num` responses, (solved + 1) / (num + 2), (N,) float64.

    Source: CurES, Zeng et al. 2025, arXiv:2510.01037, a Beta(1, 1) prior.

    Example:
        >>> solve_chance(torch.tensor([0, 2, 4]), torch.tensor([4, 4, 4]))
        tensor([0.1667, 0.5000, 0.8333], dtype=torch.float64)
    """
    return (solved.double() + 1) / (num.double() + 2)


def uncertain_first(rates: Tensor, temperature: Tensor | float) -> Tensor:
    """Chance of each prompt, in proportion to exp(sqrt(p (1 - p)) / temperature), (N,) float64, sum 1.

    Source: CurES, Zeng et al. 2025, arXiv:2510.01037. The authors' code has a temperature of (solved + 1) / 0.01 for
    each prompt, at least 100, under which all prompts are as likely; give one of the size of 0.1.

    Example:
        >>> uncertain_first(torch.tensor([0.0, 0.5]), 0.25)
        tensor([0.1192, 0.8808], dtype=torch.float64)
    """
    rates = rates.double()
    return torch.softmax((rates * (1 - rates)).clamp(min=0).sqrt() / temperature, 0)
