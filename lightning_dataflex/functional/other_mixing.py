"""Published rules for domain proportions that no mixer here uses, for those who build their own.

Aioli needs probe phases in which single domains are trained on, ADO a power law fitted to each domain's loss; the
others are variants of rules that are there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dataflex.functional.proportions import normalised


def aioli(prior: Tensor, effects: Tensor, eta: float) -> Tensor:
    """prior_j exp(eta * sum_i A_ij), scaled to sum to 1, (K,) float64.

    Source: Aioli, Chen et al. 2024, arXiv:2411.05735.

    Args:
        prior: (K,) proportions so far.
        effects: (K, K), A_ij how much the loss of domain i falls by training on j.

    Example:
        >>> aioli(torch.ones(2), torch.tensor([[0.5, 0.0], [0.5, 0.0]]), 1.0)
        tensor([0.7311, 0.2689], dtype=torch.float64)
    """
    return torch.softmax(prior.double().log() + eta * effects.double().sum(0), 0)


def ado(
    prior: Tensor,
    history: Tensor,
    exponent: Tensor,
    loss: Tensor,
    irreducible: Tensor,
    count: Tensor,
    average: Tensor,
    *,
    smoothing: float = 0.9,
    least_exponent: float = 0.05,
) -> tuple[Tensor, Tensor]:
    """The proportions of the step, and the instant ones that are in them, (K,) float64 each.

    In proportion to prior * sqrt(history) * slope, where the slope of a power law is exponent (L - L_irreducible) / n.

    Source: ADO, Jiang et al. 2024, arXiv:2410.11820, as implemented.

    Args:
        prior: (K,) proportions to stay near to.
        history: (K,) credit, an average of the proportions that were used.
        exponent: (K,) of each domain's power law; at least `least_exponent` is taken.
        loss: (K,) now.
        irreducible: (K,) what the power law falls to.
        count: (K,) samples seen.
        average: (K,) average of the instant proportions so far.
        smoothing: Its share in what is used.

    Example:
        >>> two = torch.ones(2)
        >>> ado(two / 2, two / 2, torch.tensor([0.3, 0.1]), two * 2, two, two * 10, two / 2)[1]
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    slope = exponent.double().clamp(min=least_exponent) * (loss.double() - irreducible.double()) / count.double()
    instant = normalised(prior.double() * history.double().sqrt() * slope)
    return smoothing * average.double() + (1 - smoothing) * instant, instant


def harmonic_deficit(rewards: list[dict[str, list[float]]], temperature: float) -> dict[str, float]:
    """softmax of 1 - mean decayed reward; one of the newest step counts whole, of the step before half, then a third.

    Source: the code of RuleReasoner, Liu et al. 2025, arXiv:2506.08672, which differs from its paper: see
    `mixing.dads`. Its epsilon stands inside of the exponential and cancels.

    Args:
        rewards: Of each step, oldest first, the rewards of each domain.

    Example:
        >>> harmonic_deficit([{"a": [0.5], "b": [0.5]}], 0.3)
        {'a': 0.5, 'b': 0.5}
    """
    domains = list(dict.fromkeys(name for step in rewards for name in step))
    means = []
    for name in domains:
        decayed = [r / age for age, step in enumerate(reversed(rewards), 1) for r in step.get(name, [])]
        means.append(sum(decayed) / len(decayed))
    deficit = (1 - torch.tensor(means, dtype=torch.float64)).clamp(min=0)
    return dict(zip(domains, torch.softmax(deficit / temperature, 0).tolist()))


def tscl_online(slopes: Tensor, change: Tensor, rate: float) -> Tensor:
    """Q + rate (change - Q), (K,): the slope of each domain as an average of its changes; a domain without data has 0.

    Source: TSCL, Matiisen et al. 2017, arXiv:1707.00183, the online algorithm; `mixing.slope` is that of the window.

    Args:
        slopes: (K,) Q so far.
        change: (K,) reward minus that before; NaN for a domain that was not sampled.

    Example:
        >>> tscl_online(torch.tensor([0.0, 0.2]), torch.tensor([0.3, torch.nan]), 0.1)
        tensor([0.0300, 0.1800], dtype=torch.float64)
    """
    return slopes.double() + rate * (change.double().nan_to_num(nan=0.0) - slopes.double())


def epsilon_greedy(values: Tensor, epsilon: float) -> Tensor:
    """1 - epsilon for the domain with the largest value, and epsilon shared by all, (K,) float64; of equals the first.

    Source: TSCL, Matiisen et al. 2017, arXiv:1707.00183.

    Example:
        >>> epsilon_greedy(torch.tensor([0.001, 0.002]), 0.1)
        tensor([0.0500, 0.9500], dtype=torch.float64)
    """
    shares = torch.full_like(values, epsilon / len(values), dtype=torch.float64)
    shares[int(torch.argmax(values))] += 1 - epsilon
    return shares
