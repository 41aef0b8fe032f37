"""A policy small enough for its gradient to be written down in NumPy, in modules that offer different mounts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

N, L, D, V = 8, 5, 3, 4
CLIP = 0.2
LR = 0.3


def rollout(seed: int = 0, num_samples: int = N) -> dict[str, Any]:
    """A batch of float64 tensors: groups of 2, ragged masks, rewards of 0 and 1, NaN in the padding of advantages."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, L + 1, num_samples)
    mask = (np.arange(L)[None] < lengths[:, None]).astype(np.int64)
    advantages = draw.normal(size=(num_samples, 1)) * np.ones((1, L))
    advantages[mask == 0] = np.nan
    rewards = np.zeros((num_samples, L))
    rewards[np.arange(num_samples), lengths - 1] = draw.integers(0, 2, num_samples)
    return {
        "features": torch.from_numpy(draw.normal(size=(num_samples, L, D))),
        "actions": torch.from_numpy(draw.integers(0, V, (num_samples, L))),
        "old_log_probs": torch.from_numpy(draw.normal(-1.4, 0.15, (num_samples, L))),
        "advantages": torch.from_numpy(advantages),
        "response_mask": torch.from_numpy(mask),
        "rm_scores": torch.from_numpy(rewards),
        "uid": torch.arange(num_samples) // 2,
    }


def policy() -> nn.Linear:
    linear = nn.Linear(D, V, bias=False).double()
    with torch.no_grad():
        linear.weight.copy_(torch.linspace(-1, 1, V * D).reshape(V, D))
    return linear


def per_token(linear: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Clipped policy-gradient losses (N, L), 0 in padding."""
    log_probs = linear(batch["features"]).log_softmax(-1).gather(-1, batch["actions"][..., None])[..., 0]
    mask = batch["response_mask"].bool()
    advantages = torch.where(mask, batch["advantages"], 0.0)
    ratio = (log_probs - batch["old_log_probs"]).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return torch.where(mask, losses, 0.0)


def token_mean(losses: Tensor, batch: dict[str, Any]) -> Tensor:
    if batch.get("rollout_is_weights") is not None:
        losses = losses * batch["rollout_is_weights"]
    return losses.sum() / batch["response_mask"].sum().clamp(min=1)


class LossModule(nn.Module):
    def forward(self, batch: dict[str, Any], losses: Tensor) -> Tensor:
        return token_mean(losses, batch)


class Toy(LightningModule):
    """`offers` is what a mount finds: point, submodule, method, keyword, batch or gradient."""

    def __init__(
        self, offers: str = "point", *, manual: bool = False, optimizer: str = "SGD", adv_estimator: str | None = None
    ) -> None:
        super().__init__()
        from lightning_dataflex import DataFlexPoint

        self.offers, self.optimizer_name, self.adv_estimator = offers, optimizer, adv_estimator
        self.automatic_optimization = not manual
        self.linear = policy()
        if offers == "point":
            self.dataflex = DataFlexPoint()
        if offers == "submodule":
            self.policy_loss = LossModule()
        self.losses_seen: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        if self.offers == "point":
            batch = self.dataflex(batch)
        if self.automatic_optimization:
            loss = self._loss(batch)
            self.losses_seen.append(float(loss.detach()))
            return loss
        optimizer = self.optimizers()
        for mini in minibatches(batch):
            optimizer.zero_grad()
            self.manual_backward(self._loss(mini))
            optimizer.step()
        return None

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        losses = per_token(self.linear, batch)
        if self.offers == "submodule":
            return self.policy_loss(batch, losses)
        if self.offers == "method":
            return self.my_loss(losses, batch=batch)
        if self.offers == "keyword":
            return self.keyword_loss(losses, batch["response_mask"], batch["advantages"], batch["uid"])
        if self.offers == "gradient":
            self.pg_losses, self.rollout_batch = losses, batch
        return token_mean(losses, batch)

    def my_loss(self, losses: Tensor, batch: dict[str, Any]) -> Tensor:
        return token_mean(losses, batch)

    def keyword_loss(
        self,
        losses: Tensor,
        response_mask: Tensor,
        advantages: Tensor,
        uid: Tensor,
        rollout_is_weights: Tensor | None = None,
    ) -> Tensor:
        losses = torch.where(response_mask.bool(), losses, 0.0)
        return token_mean(losses, {"response_mask": response_mask, "rollout_is_weights": rollout_is_weights})

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("loss", per_token(self.linear, batch).mean())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=LR)


class ToyData(LightningDataModule):
    """Two rollouts, as the command line would load them."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader([rollout(0), rollout(1)], batch_size=None)

    val_dataloader = test_dataloader = train_dataloader


MOUNTS = {
    "point": None,
    "submodule": None,
    "method": "my_loss",
    "keyword": "keyword_loss",
    "batch": "on_train_batch_start",
    "gradient": "on_before_backward",
}
"""What each kind of toy module is mounted by; None is the default."""


def minibatches(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Two PPO epochs of two minibatches each, in order."""
    for _ in range(2):
        for rows in (slice(0, N // 2), slice(N // 2, N)):
            yield {key: value[rows] for key, value in batch.items()}


def fit(module: LightningModule, callbacks: list[Any], batches: Any, ckpt_path: Any = None, **trainer: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    fitter = Trainer(callbacks=callbacks, **(settings | trainer))
    data = batches if isinstance(batches, LightningDataModule) else DataLoader(batches, None, collate_fn=as_it_is)
    fitter.fit(module, data, ckpt_path=ckpt_path)
    return fitter


def as_it_is(batch: Any) -> Any:
    return batch


# -- the same in NumPy, without autograd -----------------------------------------------------------------------------


def gradient(weight: np.ndarray, batch: dict[str, Any], weights: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """d token-mean loss / d weight, with per-token `weights` and the `mask` that the loss divides by."""
    x, a = batch["features"].numpy(), batch["actions"].numpy()
    logits = x @ weight.T
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    log_probs = np.log(np.take_along_axis(probs, a[..., None], -1)[..., 0])
    ratio = np.exp(log_probs - batch["old_log_probs"].numpy())
    advantage = np.where(mask > 0, batch["advantages"].numpy(), 0.0)
    inside = np.where(advantage > 0, ratio < 1 + CLIP, ratio > 1 - CLIP)
    slope = np.where((mask > 0) & inside, -advantage * ratio * weights, 0.0) / max(mask.sum(), 1)
    one_hot = np.eye(V)[a]
    return np.einsum("nl,nlv,nld->vd", slope, one_hot - probs, x)


def softmax_weights(batch: dict[str, Any], temperature: float) -> np.ndarray:
    """Weights (N, L) of exp(|A| / T) with mean 1 over valid tokens."""
    mask = batch["response_mask"].numpy()
    size = np.abs(batch["advantages"].numpy()[:, 0])
    weight = np.exp(size / temperature)
    weight *= mask.sum() / (weight * mask.sum(-1)).sum()
    return weight[:, None] * mask


def kept_rows(batch: dict[str, Any]) -> np.ndarray:
    """The samples of groups that are neither all solved nor all failed, (N,) 0 or 1."""
    outcome = np.where(batch["response_mask"].numpy() > 0, batch["rm_scores"].numpy(), 0).sum(-1) > 0.5
    uid = batch["uid"].numpy()
    rate = np.array([outcome[uid == u].mean() for u in uid])
    return ((rate > 0) & (rate < 1)).astype(float)
