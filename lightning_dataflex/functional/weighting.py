"""How much a sample or token counts. Every function returns weights >= 0; a NaN score has weight 0.

The rules here give weights as their sources define them. `mean_one` then scales them, so that the step size
stays that of the unweighted loss and only the emphasis moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dataflex.functional.blocks import by_rows, masked
from lightning_dataflex.functional.comparing import is_nan, without_nan

FLOAT_MAX = torch.finfo(torch.float32).max
"""The largest number that a weight can be."""


def mean_one(weights: Tensor, tokens: Tensor, measure: Tensor | None = None) -> Tensor:
    """The weights scaled so that their mean over the valid tokens, or by another measure, is 1.

    Args:
        weights: (N,) of samples or (N, L) of tokens. NaN counts as 0.
        tokens: How many valid tokens each weight stands for: (N,) the lengths of the samples, or (N, L) their
            `response_mask`.
        measure: How much each weight counts in the mean, of the shape of `weights`. Default, and where it is 0 for all
            weights that are not: `tokens`.

    Returns:
        The shape of `weights`; all zeros where there is no positive weight on a valid token.

    Example:
        >>> mean_one(torch.tensor([0.5, 1.5]), torch.tensor([9, 1]))
        tensor([0.8333, 2.5000])
        >>> mean_one(torch.tensor([2.0, 2.0, 4.0, 9.0]), torch.tensor([1, 1, 1, 0]))
        tensor([0.7500, 0.7500, 1.5000, 0.0000])
    """
    weights = finite_weights(torch.where(weights.isnan() | (tokens == 0), 0.0, weights))
    scale = unit_scale(*row_means(weights, tokens))
    if measure is not None:
        other = unit_scale(*row_means(weights, measure))
        scale = torch.where(other > 0, other, scale)
    return rescaled(weights, scale)


def row_means(weights: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
    """The mean weight of each sample by a measure, float64 (N,), and the sample's measure (N,).

    Example:
        >>> row_means(torch.tensor([[1.0, 4.0, 9.0]]), torch.tensor([[2, 1, 0]]))
        (tensor([2.], dtype=torch.float64), tensor([3]))
    """
    if weights.dim() == 1:
        return weights.double(), measure
    total = measure.sum(1)
    return torch.where(total > 0, (weights.double() * measure).sum(1) / total, 0.0), total


def unit_scale(mean_weights: Tensor, tokens: Tensor) -> Tensor:
    """The factor that gives the weights a mean of 1 over the valid tokens, float64 scalar; 0 where all are 0.

    Args:
        mean_weights: (N,) mean weight of each sample's valid tokens.
        tokens: (N,) how many those are.

    Example:
        >>> unit_scale(torch.tensor([0.5, 1.5]), torch.tensor([9, 1]))
        tensor(1.6667, dtype=torch.float64)
    """
    total = (mean_weights.double() * tokens).sum()
    return torch.where(total > 0, tokens.sum() / total, 0.0)


def rescaled(weights: Tensor, scale: Tensor) -> Tensor:
    """The weights times `scale`; what is too small for their precision becomes 0.

    Example:
        >>> rescaled(torch.tensor([4.0, 2e-38]), torch.tensor(0.25))
        tensor([1., 0.])
    """

    def scaled(rows: Tensor) -> Tensor:
        product = (rows.double() * scale).to(rows.dtype)
        return torch.where(product < torch.finfo(product.dtype).tiny, 0.0, product)

    return by_rows(scaled, weights)


def finite_weights(weights: Tensor) -> Tensor:
    """The weights, in place of an infinite one the largest number.

    Scaled, it takes everything, shared among its equals: the limit, where dividing by infinity would give NaN.

    Example:
        >>> mean_one(torch.tensor([torch.inf, 1.0, torch.inf]), torch.tensor([1, 2, 3]))
        tensor([1.5000, 0.0000, 1.5000])
    """
    return weights.clamp(max=FLOAT_MAX)


def least_and_largest(weights: Tensor) -> Tensor:
    """The two as one tensor, (2,); zeros of no weights.

    Example:
        >>> least_and_largest(torch.tensor([0.5, 2.0, 1.0]))
        tensor([0.5000, 2.0000])
    """
    return torch.stack(weights.aminmax()) if weights.numel() else weights.new_zeros(2)


def softmax(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """exp(s / T), scaled to sum to 1 over the samples with a score.

    Args:
        scores: (N,).
        temperature: > 0; small values favour the highest score.

    Example:
        >>> softmax(torch.tensor([0.0, torch.nan, 1.0]))
        tensor([0.2689, 0.0000, 0.7311])
    """
    scored = ~scores.isnan()
    weights = torch.softmax(torch.where(scored, scores / temperature, -torch.inf), 0)
    # An infinite score takes everything, shared among its equals: the limit of softmax, which alone would give NaN.
    infinite = scores == torch.inf
    weights = torch.where(infinite.any(), infinite / infinite.sum(), weights)
    return torch.where(scored & ~weights.isnan(), weights, 0.0)


def quantile_band(scores: Tensor, low_q: float, high_q: float, focus_weight: float) -> Tensor:
    """`focus_weight` for scores between two quantiles (ends included), 1 for the others.

    Args:
        scores: (N,); the quantiles are those of the samples with a score.

    Example:
        >>> quantile_band(torch.tensor([0.0, 0.5, 0.5, 1.0, torch.nan]), 0.25, 0.75, 2.0)
        tensor([1., 2., 2., 1., 0.])
    """
    scored = ~scores.isnan()
    if not scored.any():
        return torch.zeros_like(scores)
    low, high = quantile(scores[scored], low_q), quantile(scores[scored], high_q)
    weights = torch.where((scores >= low) & (scores <= high), focus_weight, 1.0)
    return torch.where(scored, weights, 0.0).to(scores.dtype)


def quantile(values: Tensor, q: float, *, overwrite_input: bool = False) -> Tensor:
    """Linear-interpolation quantile, float64 scalar, for more values than the 2^24 that `torch.quantile` takes.

    Args:
        values: (N,).
        q: In [0, 1].
        overwrite_input: Whether the values may be left in another order, which saves a copy of them.

    Example:
        >>> quantile(torch.tensor([0.0, 1.0, 4.0]), 0.75)
        tensor(2.5000, dtype=torch.float64)
    """
    place = float(_place(q, torch.tensor(len(values))))
    below = int(place)
    places = [below, min(below + 1, len(values) - 1)]
    low, high = order_statistics(values, places, overwrite_input=overwrite_input)
    return _between(low, high, torch.tensor(place - below, dtype=torch.float64))


def quantile_inside(values: Tensor, mask: Tensor, q: float) -> Tensor:
    """As `quantile`, of the values where the mask is True: by a sort, for an accelerator that is not to be waited for.

    Args:
        values: Of any shape.
        mask: Of that shape, bool. Of no values the quantile is infinite.
        q: In [0, 1].

    Example:
        >>> quantile_inside(torch.tensor([0.0, 9.0, 1.0, 4.0]), torch.tensor([True, False, True, True]), 0.75)
        tensor(2.5000, dtype=torch.float64)
    """
    ordered = torch.where(mask, values, torch.inf).flatten().sort().values
    if not len(ordered):
        return ordered.new_full((), torch.inf, dtype=torch.float64)
    place = _place(q, mask.sum())
    below = place.long()
    low, high = ordered.gather(0, torch.stack([below, (below + 1).clamp(max=len(ordered) - 1)])).unbind()
    return _between(low, high, place - below)


def _place(q: float, num: Tensor) -> Tensor:
    """Where the quantile lies among so many sorted values, from 0, float64."""
    place = q * (num - 1).clamp(min=0).double()
    whole = place.round()
    # What rounding adds to a whole place would fall between two values.
    return torch.where((place - whole).abs() < 1e-9 * whole.clamp(min=1), whole, place)


def _between(low: Tensor, high: Tensor, part: Tensor) -> Tensor:
    """What lies so far from one number to another, float64. Beside an infinite one the nearer, and not NaN."""
    low, high = low.double(), high.double()
    nearer = torch.where(part < 0.5, low, high)
    return torch.where(low.isfinite() & high.isfinite(), torch.lerp(low, high, part.to(low.device)), nearer)


def order_statistics(values: Tensor, places: Sequence[int], *, overwrite_input: bool = False) -> list[Tensor]:
    """The values at these places, from 0, of the sorted ones, without a sort.

    Example:
        >>> order_statistics(torch.tensor([5.0, 1.0, 3.0]), [0, 1])
        [tensor(1.), tensor(3.)]
    """
    if values.device.type != "cpu":
        return [values.kthvalue(place + 1).values for place in places]
    # NumPy finds all in one pass, and keeps no index of each value beside it; it knows no bfloat16 and no gradient.
    array = (values.float() if values.dtype == torch.bfloat16 else values).detach().numpy()
    array = array if overwrite_input else array.copy()
    array.partition(list(places))
    return [torch.from_numpy(array)[place].clone() for place in places]


def probability_mix(probs: Tensor, alpha: float) -> Tensor:
    """alpha * p + 1 - alpha: damps the tokens that the policy itself found improbable.

    Source: advantage reweighting, Yang et al. 2025, arXiv:2505.12929, equation 7.

    Args:
        probs: any shape, in [0, 1], from the policy that generated.
        alpha: in [0, 1]; 0 leaves every weight at 1.

    Example:
        >>> probability_mix(torch.tensor([0.1, 0.9, 1.0]), 0.3)
        tensor([0.7300, 0.9700, 1.0000])
    """
    return by_rows(lambda rows: without_nan(alpha * rows + 1 - alpha), probs)


def power(scores: Tensor, alpha: float) -> Tensor:
    """s^alpha; with |advantage| as the score, samples with more to learn from count for more.

    Named `per_advantage` by the ancestor. It is not prioritised experience replay (Schaul et al. 2016,
    arXiv:1511.05952): that samples in proportion to |A|^alpha and then weights down what it drew too often.

    Args:
        scores: any shape, >= 0.

    Example:
        >>> power(torch.tensor([4.0, 0.0, torch.nan]), 0.5)
        tensor([2., 0., 0.])
    """
    # NaN to the power of 0 is 1.
    return by_rows(lambda rows: masked(rows.clamp(min=0).pow(alpha), ~is_nan(rows)), scores)
