"""Advantage estimators: how much better a response was than expected.

Group estimators compare a response with the others of its prompt; `gae` compares it with a value model.
Samples that cannot be scored (`valid` is False, or the outcome is NaN) enter no statistic and get 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dataflex.functional.comparing import is_finite
from lightning_dataflex.functional.groups import (
    by_sample,
    group_differs,
    group_index,
    group_mean,
    group_mean_and_std,
    group_size,
    group_std,
)
from lightning_dataflex.functional.tokens import as_float


def grpo_advantages(
    outcomes: Tensor,
    ids: Tensor,
    *,
    valid: Tensor | None = None,
    scale: bool = True,
    correction: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages, (r - mean) / (std + eps) within each group.

    Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1; `scale=False` is Dr. GRPO
    (Liu et al. 2025, arXiv:2503.20783).

    Args:
        outcomes: (N,) one reward per sample.
        ids: (N,) integers; samples of one group share one.
        valid: (N,) bool, the samples that count. Default: all.
        scale: Divide by the group's standard deviation.
        correction: 1 for the sample standard deviation, 0 for the population's.

    Returns:
        (N,) float32 (float64 for float64 outcomes). A group of one, and a group whose rewards are all
        equal, gets exactly 0.

    Example:
        >>> grpo_advantages(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([3, 3, 4]))
        tensor([ 0.7071, -0.7071,  0.0000])
    """
    valid = _scorable(outcomes, valid)
    group, num_groups = group_index(ids)
    mean, std = group_mean_and_std(outcomes, group, num_groups, valid, correction=correction)
    centred = outcomes.double() - by_sample(mean, group)
    if scale:
        centred = centred / (by_sample(std, group) + eps)
    signal = by_sample(group_differs(outcomes, group, num_groups, valid), group)
    return _result(torch.where(valid & signal, centred, 0.0), outcomes)


def rloo_advantages(outcomes: Tensor, ids: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Leave-one-out advantages, r_i minus the mean reward of the other samples of the group.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, equation 7.

    Returns:
        (N,) as `grpo_advantages`. A group of one has nothing to compare with and gets 0.

    Example:
        >>> rloo_advantages(torch.tensor([0.6, 1.0, 0.0]), torch.tensor([0, 1, 1]))
        tensor([ 0.,  1., -1.])
    """
    valid = _scorable(outcomes, valid)
    group, num_groups = group_index(ids)
    size = by_sample(group_size(group, num_groups, valid), group)
    mean = by_sample(group_mean(outcomes, group, num_groups, valid), group)
    signal = by_sample(group_differs(outcomes, group, num_groups, valid), group)
    left_out = (outcomes.double() - mean) * size / (size - 1)
    return _result(torch.where(valid & signal, left_out, 0.0), outcomes)


def group_advantages(outcomes: Tensor, ids: Tensor, estimator: str | None) -> Tensor:
    """The advantages (N,) of a group estimator, by its name.

    Raises:
        ValueError: It is none of grpo, dr_grpo and rloo.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), "rloo")
        tensor([ 1., -1.])
    """
    name = str(estimator).removesuffix("_vectorized")
    if name == "rloo":
        return rloo_advantages(outcomes, ids)
    if name not in ("grpo", "dr_grpo"):
        raise ValueError(
            f"adv_estimator is {estimator!r}. Advantages of a group that is put together from parts can be computed "
            "for grpo, dr_grpo and rloo."
        )
    return grpo_advantages(outcomes, ids, scale=name == "grpo")


def reinforce_advantages(
    outcomes: Tensor, ids: Tensor | None = None, *, valid: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Advantages normalised over the whole batch, as REINFORCE++ does.

    Source: Hu et al. 2025, arXiv:2501.03262. With `ids` the group's mean is subtracted first, which is the
    paper's variant with a baseline.

    Returns:
        (N,) as `grpo_advantages`; 0 everywhere when all are equal.

    Example:
        >>> reinforce_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0]))
        tensor([ 0.8660, -0.8660,  0.8660, -0.8660])
    """
    valid = _scorable(outcomes, valid)
    values = outcomes.double()
    if ids is not None:
        group, num_groups = group_index(ids)
        values = values - by_sample(group_mean(outcomes, group, num_groups, valid), group)
    whole = torch.zeros_like(values, dtype=torch.int64)
    centred = values - group_mean(values, whole, 1, valid)
    scaled = centred / (group_std(values, whole, 1, valid) + eps)
    signal = group_differs(outcomes, *((whole, 1) if ids is None else (group, num_groups)), valid).any()
    return _result(torch.where(valid & signal, scaled, 0.0), outcomes)


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates of each token, and the returns that the value head is fitted to.

    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16, with value 0 after the last valid token.

    Args:
        rewards: (N, L) reward of each token.
        values: (N, L) value of the state before each token.
        response_mask: (N, L) the valid tokens; what stands elsewhere is not read.

    Returns:
        `advantages` and `returns`, each (N, L) float32 (float64 for float64 values), 0 outside the mask.

    Raises:
        ValueError: Rewards, values and mask are not all of one shape.

    Example:
        >>> advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1, 1]]))
        >>> advantages, returns
        (tensor([[0.5000, 0.5000]]), tensor([[1., 1.]]))
    """
    valid = response_mask.bool()
    for name, table in (("rewards", rewards), ("values", values)):
        if table.shape != valid.shape:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}. It must have a number for each response token, "
                f"{tuple(valid.shape)}."
            )
    # The sum of a long response in half precision would lose what its later tokens add.
    rewards = torch.where(valid, as_float(rewards), 0.0)
    values = torch.where(valid, as_float(values), 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * next_advantage
        # A hole in the mask hands on what came after it, so that padding on either side changes nothing.
        next_advantage = torch.where(valid[:, t], here, next_advantage)
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(valid[:, t], here, 0.0)
    return advantages, advantages + values


def _scorable(outcomes: Tensor, valid: Tensor | None) -> Tensor:
    finite = is_finite(outcomes)
    return finite if valid is None else finite & valid.bool()


def _result(advantages: Tensor, like: Tensor) -> Tensor:
    return advantages if like.dtype == torch.float64 else advantages.float()
