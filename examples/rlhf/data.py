"""The prompts of a run, as a LightningDataModule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, DistributedSampler

from examples.rlhf import gym, tasks
from examples.rlhf.rollout import run_seed
from examples.rlhf.tasks import PromptSplit, Row
from lightning_dataflex import mixture_dataloader


class PromptDataModule(LightningDataModule):
    """Train and held-out prompts of several domains, and the verifier that scores a response to one.

    Args:
        source: `embedded` for the tasks of `examples.rlhf.tasks`, `reasoning_gym` for that library's generators.
        domains: Domains of the embedded tasks, or names of generators. Default: all embedded domains.
        num_train: Train prompts per domain.
        num_held_out: Held-out prompts per domain; none of them is a train prompt.
        batch_size: Prompts per step on each rank.
        held_out_batch_size: Prompts per validation or test step.
        mixed: Draw each training batch by proportions of the domains, which a mixer can change; else each epoch goes
            through all prompts once.
        seed: Decides which prompts there are. The order they come in follows from `seed_everything`.
    """

    def __init__(
        self,
        source: Literal["embedded", "reasoning_gym"] = "embedded",
        domains: Sequence[str] | None = None,
        num_train: int = 400,
        num_held_out: int = 64,
        batch_size: int = 16,
        held_out_batch_size: int = 160,
        mixed: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        # Not logged: Lightning refuses to log a name that the module has too.
        self.save_hyperparameters(logger=False)
        self.domains = list(domains or ([] if source == "reasoning_gym" else tasks.DOMAINS))
        if not self.domains:
            raise ValueError(f"domains is {domains!r} with source {source!r}. Name generators, such as [chain_sum].")
        self.verifier: Callable[[Row, str], float] = tasks.verified if source == "embedded" else gym.verified
        self.prompts: PromptSplit | None = None

    def setup(self, stage: str | None = None) -> None:
        if self.prompts is None:
            split = tasks.split if self.hparams.source == "embedded" else gym.split
            self.prompts = split(self.domains, self.hparams.num_train, self.hparams.num_held_out, self.hparams.seed)

    def train_dataloader(self) -> DataLoader:
        rows, batch_size = self.prompts.train, self.hparams.batch_size
        if self.hparams.mixed:
            names = {"domains": self.domains, "seed": run_seed()}
            return mixture_dataloader(rows, batch_size, **names, drop_last=True, collate_fn=list)
        ranks = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        # One seeded order, dealt out over the ranks, a new one each epoch. Lightning leaves this sampler as it is.
        sampler = DistributedSampler(rows, *ranks, shuffle=True, seed=run_seed(), drop_last=True)
        return DataLoader(rows, batch_size, sampler=sampler, drop_last=True, collate_fn=list)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.prompts.held_out, self.hparams.held_out_batch_size, collate_fn=list)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()
