"""Scorers by what policies say of the tokens: probabilities, entropies, how far one policy is from another."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional import policy, scoring
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.loss import KLEstimator
from lightning_dataflex.functional.tokens import token_mean, token_sum

PerResponse = Literal["mean", "sum"]
PerToken = Literal["token", "sequence", "mean"]


class _OfTokens(Scorer):
    """A number of each token, or over the valid tokens of a response its mean, or its sum: `sum` or `sequence`."""

    timing = "post_advantage"

    def _set_level(self, level: str, allowed: Any) -> None:
        check_choice("level", level, allowed)
        self.level: Any = level
        self.granularity = "token" if level == "token" else "response"

    def _reduced(self, values: Tensor, mask: Tensor | None) -> Tensor:
        # What came from other ranks is one number of a response already.
        if self.level == "token" or values.dim() == 1:
            return values
        return (token_mean if self.level == "mean" else token_sum)(values, mask)


@register_scorer("token_prob")
class TokenProb(Scorer):
    """Probability of each token under the policy before its update, which as a rule is the one that generated it.

    Example:
        >>> import torch
        >>> TokenProb().score({"old_log_probs": torch.tensor([[0.0, -1.0]]), "response_mask": torch.tensor([[1, 1]])})
        tensor([[1.0000, 0.3679]])
    """

    requires = ("old_log_probs", "response_mask")
    signal = "probability"
    by_mask = True
    timing = "post_advantage"
    granularity = "token"
    row_wise = True
    paper = "Advantage reweighting, arXiv:2505.12929"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return scoring.token_prob(batch.tokens("old_log_probs"), batch.response_mask)


@register_scorer("sequence_logprob")
class SequenceLogprob(_OfTokens):
    """Log-probability of each response under the policy before its update.

    Args:
        level: `sum` over its tokens, or their `mean`, which does not fall with the length.

    Example:
        >>> import torch
        >>> batch = {"old_log_probs": torch.tensor([[-1.0, -3.0]]), "response_mask": torch.tensor([[1, 1]])}
        >>> SequenceLogprob().score(batch), SequenceLogprob("mean").score(batch)
        (tensor([-4.]), tensor([-2.]))
    """

    requires = ("old_log_probs", "response_mask")
    signal = "log-probability"
    granularity = "response"
    row_wise = True

    def __init__(self, level: PerResponse = "sum", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._set_level(level, PerResponse)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return self._reduced(batch.tokens("old_log_probs"), batch.response_mask)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"old_log_probs": self._reduced(batch.tokens("old_log_probs"), batch.response_mask)}


@register_scorer("token_entropy")
class TokenEntropy(Scorer):
    """Entropy of the policy at each token, in nats, as the module puts it into `entropies`.

    Example:
        >>> import torch
        >>> TokenEntropy().score({"entropies": torch.tensor([[0.5, 2.0]]), "response_mask": torch.tensor([[1, 1]])})
        tensor([[0.5000, 2.0000]])
    """

    requires = ("entropies", "response_mask")
    signal = "entropy"
    by_mask = True
    timing = "post_advantage"
    granularity = "token"
    row_wise = True
    paper = "Beyond the 80/20 rule, arXiv:2506.01939"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return batch.tokens("entropies")


@register_scorer("sequence_entropy")
class SequenceEntropy(_OfTokens):
    """Entropy of the policy over each response, in nats.

    Args:
        level: `mean` over its tokens, or their `sum`.

    Example:
        >>> import torch
        >>> batch = {"entropies": torch.tensor([[0.5, 1.5]]), "response_mask": torch.tensor([[1, 1]])}
        >>> SequenceEntropy().score(batch)
        tensor([1.])
    """

    requires = ("entropies", "response_mask")
    signal = "entropy"
    paper = "GRPO-S, arXiv:2508.04349"
    granularity = "response"
    row_wise = True

    def __init__(self, level: PerResponse = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._set_level(level, PerResponse)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return self._reduced(batch.tokens("entropies"), batch.response_mask)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"entropies": self._reduced(batch.tokens("entropies"), batch.response_mask)}


@register_scorer("ref_kl")
class RefKL(_OfTokens):
    """Estimate of KL(policy || reference), from the log-probabilities of the tokens that were generated.

    Args:
        level: `token`; `sequence`, the sum over a response; or `mean`.
        estimator: `k1`, the log-ratio x, which may be negative; `k2`, x^2 / 2; or `k3`, exp(-x) - 1 + x.

    Example:
        >>> import torch
        >>> ones = torch.tensor([[1, 1]])
        >>> batch = {"old_log_probs": 1.0 * ones, "ref_log_probs": 0.0 * ones, "response_mask": ones}
        >>> RefKL(estimator="k1").score(batch), RefKL("mean").score(batch)
        (tensor([[1., 1.]]), tensor([0.3679]))
    """

    requires = ("old_log_probs", "ref_log_probs", "response_mask")
    signal = "kl"
    paper = "Schulman 2020, Approximating KL divergence"
    granularity = "token"
    by_mask = True
    row_wise = True

    def __init__(self, level: PerToken = "token", estimator: KLEstimator = "k3", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._set_level(level, PerToken)
        check_choice("estimator", estimator, KLEstimator)
        self.estimator: Any = estimator

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        mask = batch.response_mask
        kl = policy.kl_to(batch.tokens("old_log_probs"), batch.tokens("ref_log_probs"), mask, self.estimator)
        return self._reduced(kl, mask)


@register_scorer("importance_ratio")
class ImportanceRatio(_OfTokens):
    """Probability under the policy that is trained over that under the one that generated.

    The generating policy's log-probabilities are `rollout_log_probs`, as an inference engine gives them; the trained
    policy's before its update are `old_log_probs`. Log-ratios are clamped to 20.

    Args:
        level: `token`; `sequence`, the product over a response; or `geometric`, its geometric mean.

    Example:
        >>> import torch
        >>> ones = torch.tensor([[1, 1]])
        >>> batch = {"old_log_probs": -1.0 * ones, "rollout_log_probs": -2.0 * ones, "response_mask": ones}
        >>> ImportanceRatio().score(batch), ImportanceRatio("sequence").score(batch)
        (tensor([[2.7183, 2.7183]]), tensor([7.3891]))
    """

    requires = ("old_log_probs", "rollout_log_probs", "response_mask")
    signal = "ratio"
    granularity = "token"
    by_mask = True
    row_wise = True
    paper = "geometric: GSPO, arXiv:2507.18071"

    def __init__(self, level: policy.Level = "token", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._set_level(level, policy.Level)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        trained, generating = batch.tokens("old_log_probs"), batch.tokens("rollout_log_probs")
        return policy.importance_ratio(policy.log_ratio(trained, generating), batch.response_mask, self.level)


@register_scorer("distill_gap")
class DistillGap(_OfTokens):
    """Log-probability of a teacher minus that of the policy: how much likelier the teacher is to say it.

    Args:
        level: `token`; `sequence`, the sum over a response; or `mean`.

    Example:
        >>> import torch
        >>> ones = torch.tensor([[1, 1]])
        >>> batch = {"old_log_probs": -2.0 * ones, "teacher_log_probs": -1.0 * ones, "response_mask": ones}
        >>> DistillGap().score(batch), DistillGap("sequence").score(batch)
        (tensor([[1., 1.]]), tensor([2.]))
    """

    requires = ("old_log_probs", "teacher_log_probs", "response_mask")
    signal = "gap"
    granularity = "token"
    by_mask = True
    row_wise = True

    def __init__(self, level: PerToken = "token", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._set_level(level, PerToken)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        gap = policy.log_ratio(batch.tokens("teacher_log_probs"), batch.tokens("old_log_probs"))
        return self._reduced(gap, batch.response_mask)
