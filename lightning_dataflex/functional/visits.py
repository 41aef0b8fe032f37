"""Whether a prompt is worth another rollout, from what its earlier ones have shown."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def skip_probability(run: Tensor, p: Tensor | float) -> Tensor:
    """1 - p^z for a prompt whose last z visits in a row were without signal; 0 for z = 0.

    Source: GRESO, Zheng et al. 2025, arXiv:2506.02177.

    Args:
        run: (N,) z.
        p: in (0, 1], of each prompt or of all.

    Example:
        >>> skip_probability(torch.tensor([0.0, 1.0, 2.0]), 0.5)
        tensor([0.0000, 0.5000, 0.7500])
    """
    return 1 - torch.as_tensor(p, dtype=run.dtype) ** run


def adjusted(
    p: float, observed: float, target: float, *, step: float = 0.01, low: float = 0.05, high: float = 0.95
) -> float:
    """The p of `skip_probability` after a step: lower if too many prompts were without signal, else higher.

    Source: GRESO, arXiv:2506.02177; bounds and step are those of the authors' implementation.

    Args:
        observed: Share of the step's prompts that were without signal.
        target: What it should be.

    Example:
        >>> adjusted(0.5, observed=0.4, target=0.25), adjusted(0.95, observed=0.0, target=0.25)
        (0.49, 0.95)
    """
    return min(max(p - step if observed >= target else p + step, low), high)


def beta_update(
    alpha: Tensor, beta: Tensor, solved: Tensor, num: Tensor, *, decay: float = 1.0, prior: tuple[float, float] = (1, 1)
) -> tuple[Tensor, Tensor]:
    """The Beta posterior of solve rates after `solved` of `num` further responses were right.

    What was known before counts `decay` as much, and the prior takes the rest.

    Source: MoPPS, Qu et al. 2025, arXiv:2507.04632.

    Args:
        alpha: (K,) of the posterior so far; `prior[0]` for a prompt that was never seen.
        beta: (K,) the same.
        solved: (K,) responses that were right.
        num: (K,) responses.
        decay: In [0, 1]; 1 forgets nothing.
        prior: Of every solve rate.

    Returns:
        `alpha` and `beta`, (K,) each.

    Example:
        >>> beta_update(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(6.0), torch.tensor(8.0), decay=0.5)
        (tensor(8.), tensor(3.5000))
    """
    return (
        decay * alpha + (1 - decay) * prior[0] + solved,
        decay * beta + (1 - decay) * prior[1] + (num - solved),
    )


def visit_runs(run: Tensor, kind: Tensor, kind_now: Tensor) -> Tensor:
    """How many visits in a row, this one included, were without signal and of the same kind, (N,).

    Args:
        run: (N,) before this visit.
        kind: (N,) of the visit before: 0 with signal, 1 all solved, 2 all failed.
        kind_now: (N,) of this visit.

    Example:
        >>> visit_runs(torch.tensor([2, 2, 2]), torch.tensor([1, 1, 1]), torch.tensor([1, 2, 0]))
        tensor([3, 1, 0])
    """
    return torch.where(kind_now == 0, 0, torch.where(kind_now == kind, run + 1, 1))


def uniform(ids: Tensor, *key: int) -> Tensor:
    """A number in [0, 1) for each id, (N,) float64: the same for the same id and key, whatever stands beside it.

    Source: the output function of SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators".

    Example:
        >>> first = uniform(torch.tensor([7, 8]), 0, 1)
        >>> bool(uniform(torch.tensor([8]), 0, 1) == first[1]), bool(uniform(torch.tensor([8]), 0, 2) == first[1])
        (True, False)
    """
    x = ids.cpu().numpy().astype(np.uint64)
    for part in (0, *key):
        x = x + np.uint64((part * 2 + 1) * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) / 2**53)
