"""Which share of the prompts each domain gets. Every function named for a rule returns proportions (K,), float64.

A domain without data has a NaN signal. Rules that learn from signals are optimistic about it: what was never
looked at is taken for as good as the best, so that it is looked at.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dataflex.functional.proportions import boltzmann, floored, normalised, optimistic


def reward_gap(mean_reward: Tensor, temperature: float) -> Tensor:
    """softmax((max m - m) / T): the lower a domain's reward, the more of it. A domain that cannot be solved gets most.

    Source: the ancestor, DataFlex-RL; a baseline. A domain without data has the largest gap.

    Example:
        >>> reward_gap(torch.tensor([0.9, 0.5, 0.1]), 0.5)
        tensor([0.1223, 0.2721, 0.6056], dtype=torch.float64)
    """
    means = mean_reward.double()
    return boltzmann(optimistic(torch.nan_to_num(means, nan=-torch.inf).max() - means), temperature)


def upper_confidence_bound(mean: Tensor, count: Tensor, c: float = 1.0) -> Tensor:
    """L + c sqrt(2 ln(N + 1) / (n + 1)), of samples counted since the start; L is 0 without data.

    Source: DUMP, Wang et al. 2025, arXiv:2504.09710; with c = 1 as there.

    Args:
        mean: (K,) mean |advantage|.
        count: (K,) samples so far.

    Example:
        >>> upper_confidence_bound(torch.tensor([0.8, 0.1]), torch.tensor([300, 100]))
        tensor([0.9996, 0.4445], dtype=torch.float64)
    """
    count = count.double()
    total = count.sum().clamp(min=1)
    return torch.nan_to_num(mean.double(), nan=0.0) + c * (2 * (total + 1).log() / (count + 1)).sqrt()


def slope(steps: Tensor, values: Tensor) -> float:
    """Least-squares slope of values over the steps at which they were seen; NaN of fewer than two steps.

    Source: TSCL, Matiisen et al. 2017, arXiv:1707.00183, the window algorithm.

    Example:
        >>> slope(torch.tensor([0, 2, 4]), torch.tensor([0.0, 0.5, 1.0]))
        0.25
    """
    x, y = steps.double() - steps.double().mean(), values.double() - values.double().mean()
    return float((x * y).sum() / x.square().sum())


def dads(ema: Tensor, temperature: float, eps: float, target: float = 1.0) -> Tensor:
    """exp(v / T) + eps of the deficit v = target - reward, scaled to sum to 1.

    Source: RuleReasoner, Liu et al. 2025, arXiv:2506.08672, in the paper's form (the shipped code puts eps inside the
    exponent, where it cancels).

    Args:
        ema: (K,) moving average of the reward, in [0, 1]; a domain without data has the largest deficit.

    Example:
        >>> dads(torch.tensor([0.3, 0.85]), 0.5, 0.1)
        tensor([0.7413, 0.2587], dtype=torch.float64)
    """
    deficit = optimistic(target - ema.double())
    # Relative to the largest, whose exponential may be no number.
    top = deficit.max().clamp(min=0)
    return normalised(((deficit - top) / temperature).exp() + eps * (-top / temperature).exp())


def importance_estimate(signal: Tensor, count: Tensor, proportions: Tensor) -> Tensor:
    """Unbiased estimate of each domain's signal from a batch that was drawn by `proportions`: (n / N) x / p.

    Of one draw this is the x / p of a bandit's arm, 0 for the others.

    Example:
        >>> importance_estimate(torch.tensor([0.3, torch.nan]), torch.tensor([1, 0]), torch.tensor([0.5, 0.5]))
        tensor([0.6000, 0.0000], dtype=torch.float64)
    """
    share = count.double() / count.sum()
    return torch.where(count > 0, share * signal.double() / proportions.double(), 0.0)


def exp3(log_weights: Tensor, gamma: float) -> Tensor:
    """(1 - gamma) w / sum(w) + gamma / K: exponential weights with an exact share of exploration.

    Source: Auer et al. 2002, "The nonstochastic multiarmed bandit problem", algorithm Exp3.

    Example:
        >>> exp3(torch.tensor([0.0, 1.0]), 0.2)
        tensor([0.3152, 0.6848], dtype=torch.float64)
    """
    return (1 - gamma) * torch.softmax(log_weights.double(), 0) + gamma / len(log_weights)


def odm_exploration(num_domains: int, turn: int) -> float:
    """min(1 / K, sqrt(ln K / (K t))): the share that every domain is sure of at turn t, counted from 1.

    Source: ODM, Albalak et al. 2023, arXiv:2312.02406.

    Example:
        >>> odm_exploration(3, 10)
        0.19136459866514058
    """
    return min(1 / num_domains, math.sqrt(math.log(num_domains) / (num_domains * max(turn, 1))))


def odm(estimates: Tensor, exploration: float, previous_exploration: float) -> Tensor:
    """(1 - K eps) softmax(eps_before R) + eps, which is never below eps.

    Source: ODM, Albalak et al. 2023, arXiv:2312.02406.

    Args:
        estimates: (K,) R, the sum of `importance_estimate`s so far.

    Example:
        >>> odm(torch.tensor([0.6, 0.0]), 0.1861648705529517, 0.5)
        tensor([0.5467, 0.4533], dtype=torch.float64)
    """
    return floored(torch.softmax(previous_exploration * estimates.double(), 0), exploration, "mixture")


def doremi(proportions: Tensor, excess: Tensor, eta: float, c: float) -> Tensor:
    """One multiplicative step: p exp(eta max(excess, 0)), scaled to sum to 1, then (1 - c) p + c / K.

    Source: DoReMi, Xie et al. 2023, arXiv:2305.10429, algorithm 1. In place of the excess loss over a reference stands
    what is missing to a target reward.

    Example:
        >>> doremi(torch.tensor([1 / 3, 1 / 3, 1 / 3]), torch.tensor([0.5, 0.0, -0.2]), 1.0, 0.001)
        tensor([0.4517, 0.2741, 0.2741], dtype=torch.float64)
    """
    # In logarithms, so that many steps neither overflow nor end at 0.
    stepped = torch.softmax(proportions.double().log() + eta * excess.double().clamp(min=0), 0)
    return (1 - c) * stepped + c / len(proportions)


def rank_prioritised(scores: Tensor, staleness: Tensor, beta: float, rho: float) -> Tensor:
    """(1 - rho) of rank^(-1 / beta), scaled, and rho of the staleness, scaled; equal scores share their ranks.

    Source: prioritised level replay, Jiang et al. 2021, arXiv:2010.03934, equations 3 to 5.

    Args:
        scores: (K,); the highest has rank 1, and a domain without data ranks with it.
        staleness: (K,) steps since a domain was last seen.

    Example:
        >>> rank_prioritised(torch.tensor([0.2, 0.9, 0.5]), torch.tensor([4, 0, 6]), beta=0.1, rho=0.1)
        tensor([0.0400, 0.8991, 0.0609], dtype=torch.float64)
    """
    scores = optimistic(scores)
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    higher, equal = (len(scores) - counts.cumsum(0))[place], counts[place]
    rank = higher + (equal + 1) / 2
    by_rank = normalised(rank.double().pow(-1 / beta))
    if not staleness.sum() > 0:
        return by_rank
    return (1 - rho) * by_rank + rho * normalised(staleness)


def e2h_gaussian(progress: float, num_domains: int, exponent: float, sigma: float, floor: float) -> Tensor:
    """A bell over the domains in order of difficulty, its middle moving from the first to the last; mixed with a floor.

    Source: E2H Reasoner, Parashar et al. 2025, arXiv:2506.06632, E2H-G.

    Args:
        progress: Share of the run that is over, in [0, 1]; the middle is at progress^exponent of the way.

    Example:
        >>> e2h_gaussian(0.25, 3, exponent=0.5, sigma=0.5, floor=1 / 6)
        tensor([0.2199, 0.5602, 0.2199], dtype=torch.float64)
    """
    middle = progress**exponent * (num_domains - 1)
    place = torch.arange(num_domains, dtype=torch.float64)
    return floored(torch.softmax(-(place - middle).square() / (2 * sigma**2), 0), floor, "mixture")


def e2h_cosine(progress: float, num_domains: int) -> Tensor:
    """a (K - k - 1) + (1 - a) k with a = (1 + cos(pi t)) / 2, scaled: from the easy half to the hard half.

    Source: E2H Reasoner, Parashar et al. 2025, arXiv:2506.06632, E2H-C.

    Example:
        >>> e2h_cosine(0.0, 3), e2h_cosine(1.0, 3)[2]
        (tensor([0.6667, 0.3333, 0.0000], dtype=torch.float64), tensor(0.6667, dtype=torch.float64))
    """
    easy = 0.5 * (1 + math.cos(math.pi * progress))
    place = torch.arange(num_domains, dtype=torch.float64)
    return normalised(easy * (num_domains - place - 1) + (1 - easy) * place)


def adarft_target(target: float, mean_reward: float, *, eta: float, alpha: float, beta: float) -> float:
    """The target difficulty after a step: T + eta tanh(alpha (reward - beta)).

    Source: AdaRFT, Shi et al. 2025, arXiv:2504.05520, equation 2; there alpha 2, eta 50 on difficulties of 0 to 100,
    beta 0.5.

    Example:
        >>> adarft_target(20, 0.8, eta=50, alpha=2, beta=0.5)
        46.85247834990177
    """
    return target + eta * math.tanh(alpha * (mean_reward - beta))


def around(target: float, difficulty: Tensor) -> Tensor:
    """Proportions with `target` as their mean difficulty, on the domains next to it on either side.

    Example:
        >>> around(46.0, torch.tensor([10.0, 40.0, 60.0]))
        tensor([0.0000, 0.7000, 0.3000], dtype=torch.float64)
    """
    levels = difficulty.double()
    target = min(max(target, float(levels.min())), float(levels.max()))
    below, above = levels[levels <= target].max(), levels[levels >= target].min()
    width = above - below
    share_above = (target - below) / width if width > 0 else torch.zeros((), dtype=torch.float64)
    # Domains of the same difficulty share what falls on it.
    at_below, at_above = normalised(levels == below), normalised(levels == above)
    return (1 - share_above) * at_below + share_above * at_above
