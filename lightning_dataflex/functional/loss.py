"""The clipped policy-gradient loss with per-token weights.

Every aggregation is a sum of per-token terms over a denominator. The denominator belongs to the whole
optimiser step, not to the piece of it at hand: `loss_denominator` counts it, over all ranks, and each
micro-batch is divided by the same number. The gradient then does not depend on how samples are cut into
ranks and micro-batches.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_dataflex.sync import mean_over_ranks

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 is already far outside every clip range."""


class PolicyLoss(NamedTuple):
    """A loss to back-propagate, and its parts, detached, for the log."""

    loss: Tensor
    parts: dict[str, Tensor]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """Clipped policy-gradient loss plus KL to a reference minus an entropy bonus.

    Source: PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric clip: DAPO, Yu et al. 2025,
    arXiv:2503.14476; KL estimators: Schulman, "Approximating KL divergence", 2020.

    Args:
        log_probs: (N, L) of the policy, with gradient.
        old_log_probs: (N, L) of the policy that generated.
        advantages: (N, L), or (N,) for one per sample.
        response_mask: (N, L) the valid tokens; what stands elsewhere is not read, NaN included.
        rollout_is_weights: (N, L), or (N,) for one per sample: the factor on each token's policy term (KL and entropy
            are not weighted).
        clip_low: The ratio is clipped below at 1 - clip_low.
        clip_high: The ratio is clipped above at 1 + clip_high. Default: clip_low.
        aggregation: How per-token terms become one number; see `token_scale`.
        denominator: What the sum is divided by: `loss_denominator` of the whole optimiser step's mask.
            Default: that of this mask, over all ranks.
        ref_log_probs: (N, L) of the frozen reference; needed when kl_coef is not 0.
        entropies: (N, L) of the policy, with gradient; needed when entropy_coef is not 0.

    Returns:
        The loss, a scalar connected to the graph even when no token is valid (it is 0 then), and its
        parts: `policy`, `kl`, `entropy` and `clipped` (1 for a clipped token), all in the loss's own normalisation.

    Raises:
        ValueError: A table is not of the shape of log_probs, which broadcasting would make another loss of.

    Example:
        >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> out = policy_loss(logp, logp.detach(), torch.tensor([1.0]), torch.tensor([[1, 1]]))
        >>> out.loss.backward(); out.loss.item(), logp.grad.tolist()
        (-1.0, [[-0.5, -0.5]])
    """
    shape = tuple(log_probs.shape)
    _check_shapes((shape,), response_mask=response_mask, old_log_probs=old_log_probs)
    per_sample = (shape[:1], (*shape[:1], 1))
    _check_shapes((shape, *per_sample), advantages=advantages, rollout_is_weights=rollout_is_weights)
    valid = response_mask.bool()
    scale = token_scale(response_mask, aggregation)
    if denominator is None:
        denominator = loss_denominator(response_mask, aggregation)

    def aggregated(per_token: Tensor) -> Tensor:
        return torch.where(valid, per_token * scale, 0.0).sum() / denominator

    # Blanked before the arithmetic, not after: a NaN that only the result is masked for still reaches the gradient,
    # and so does a weight of 0, because 0 * NaN is NaN.
    weights = None if rollout_is_weights is None else _by_token(rollout_is_weights.detach())
    counted = valid if weights is None else valid & (weights != 0)
    advantages = torch.where(counted, _by_token(advantages), 0.0)
    log_ratio = torch.where(counted, _wide(log_probs) - _wide(old_log_probs), 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    per_token = torch.maximum(-advantages * ratio, -advantages * bounded)
    clipped = aggregated((-advantages * bounded > -advantages * ratio).to(ratio.dtype))
    if weights is not None:
        per_token = per_token * torch.where(counted, weights, 0.0)
    loss = policy = aggregated(per_token)
    parts = {"policy": policy.detach(), "clipped": clipped.detach()}
    if kl_coef:
        if ref_log_probs is None:
            raise ValueError(f"kl_coef is {kl_coef} but there are no ref_log_probs. Pass them, or set kl_coef to 0.")
        kl = aggregated(token_kl(torch.where(valid, _wide(log_probs) - _wide(ref_log_probs), 0.0), kl_estimator))
        loss = loss + kl_coef * kl
        parts["kl"] = kl.detach()
    if entropy_coef:
        if entropies is None:
            raise ValueError(f"entropy_coef is {entropy_coef} but there are no entropies. Pass them, or set it to 0.")
        entropy = aggregated(torch.where(valid, _wide(entropies), 0.0))
        loss = loss - entropy_coef * entropy
        parts["entropy"] = entropy.detach()
    return PolicyLoss(loss, parts)


def token_kl(log_ratio: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate of KL(policy || reference) at each token, from r = log policy - log reference.

    k1 is r (unbiased), k2 is r^2 / 2 (biased, low variance), k3 is e^-r - 1 + r (unbiased, never negative). In k3 an r
    below -20 counts as -20, and has no gradient.

    Source: Schulman, "Approximating KL divergence", 2020.

    Example:
        >>> token_kl(torch.tensor([0.0, 1.0]), "k2")
        tensor([0.0000, 0.5000])
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"There is no KL estimator {estimator!r}. Use one of {', '.join(get_args(KLEstimator))}.")
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # All of it: with the exponential alone clamped, the gradient would lead away from the reference.
    near = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-near) + near


def token_scale(response_mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Factor on each token's term before the sum, (N, L) or (N, 1).

    `token-mean` and `seq-mean-token-sum` take every token as it is and differ in their denominators (the
    number of tokens, the number of sequences); `seq-mean-token-mean` divides a token by its sequence's length.

    Example:
        >>> token_scale(torch.tensor([[1, 1], [1, 0]]), "seq-mean-token-mean")
        tensor([[0.5000],
                [1.0000]])
    """
    _check_aggregation(aggregation)
    lengths = response_mask.bool().sum(-1, keepdim=True).float()
    if aggregation == "seq-mean-token-mean":
        return 1 / lengths.clamp(min=1)
    return torch.ones_like(lengths)


def loss_denominator(response_mask: Tensor, aggregation: Aggregation) -> Tensor:
    """What the per-token sum of a whole optimiser step is divided by.

    That is the number of valid tokens (`token-mean`) or of sequences with a valid token (the others), averaged
    over ranks, because data-parallel strategies average gradients. It is never 0, so that an
    all-masked step has loss 0. A collective: under a process group every rank must call it.

    Args:
        response_mask: (N, L) of all the micro-batches that go into one optimiser step on this rank.

    Example:
        >>> loss_denominator(torch.tensor([[1, 1], [1, 0], [0, 0]]), "token-mean")
        tensor(3.)
        >>> loss_denominator(torch.tensor([[1, 1], [1, 0], [0, 0]]), "seq-mean-token-sum")
        tensor(2.)
    """
    _check_aggregation(aggregation)
    mask = response_mask.bool()
    count = (mask if aggregation == "token-mean" else mask.any(-1)).sum().float()
    mean = mean_over_ranks(count, what="the denominator of the loss")
    return torch.where(mean > 0, mean, 1.0)


def _check_shapes(allowed: tuple[tuple[int, ...], ...], **tables: Tensor | None) -> None:
    # A rank without samples may not know how long those of the others are.
    num_samples = allowed[0][0]
    for name, table in tables.items():
        if num_samples and table is not None and tuple(table.shape) not in allowed:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)} beside log_probs {allowed[0]}. Give a number for each."
            )


def _by_token(x: Tensor) -> Tensor:
    """(N, L), or (N, 1) of one per sample."""
    return x[:, None] if x.dim() == 1 else x


def _wide(x: Tensor) -> Tensor:
    """At least float32: a ratio of e^20 overflows float16, and k3 of close policies cancels to nothing in bfloat16."""
    return x if x.dtype == torch.float64 else x.float()


def _check_aggregation(aggregation: str) -> None:
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"There is no aggregation {aggregation!r}. Use one of {', '.join(get_args(Aggregation))}.")
