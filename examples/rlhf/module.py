"""The training step of RL fine-tuning, one line for each thing that happens in it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from examples.rlhf.batches import Batch, at_last_token, micro_batches, minibatches, num_micro_batches, sliced
from examples.rlhf.estimators import Estimator, advantage_fields, value_loss
from examples.rlhf.policy import built
from examples.rlhf.reward_model import RewardModel
from examples.rlhf.rollout import Reference, Sampling, described, generated, run_seed
from examples.rlhf.solving import SOLVED, SolveRates
from examples.rlhf.tasks import Row
from examples.rlhf.warmup import warm_up
from lightning_dataflex.functional.loss import Aggregation, PolicyLoss, loss_denominator, policy_loss
from lightning_dataflex.mount import DataFlexPoint


@dataclass
class TokenCounts:
    """Response tokens so far, over all ranks: those that were generated, and those that the policy was trained on."""

    generated: int = 0
    trained: int = 0


class RLHFModule(LightningModule):
    """A causal language model, trained on its own responses by PPO, GRPO or RLOO.

    Args:
        model_path: A local Hugging Face checkpoint with its tokenizer. Default: a small embedded model.
        adv_estimator: `grpo` and `rloo` compare a response with the others to its prompt, `gae` with a value head.
        num_generations: Responses per prompt; at least 2 where they are compared.
        temperature: Of the responses in training; evaluation is greedy.
        top_p: Share of probability that responses are drawn from.
        max_new_tokens: Tokens after which a response is cut.
        ppo_epochs: Times that a rollout batch is gone through.
        num_minibatches: Optimiser steps per time; each takes whole groups.
        micro_batch_size: Samples per forward and backward pass. Changes memory, not the gradient. Default: all.
        clip_low: The policy's ratio is clipped below at 1 - clip_low.
        clip_high: And above at 1 + clip_high. Default: clip_low.
        kl_coef: Weight of the KL term to a frozen copy of the starting policy; 0 for no copy.
        entropy_coef: Weight of the entropy bonus.
        value_coef: Weight of the value head's loss, for `gae`.
        value_clip: How far a value may move from its old one before its loss stops. Default: as far as it likes.
        gamma: Discount per token, for `gae`.
        lam: Decay of the advantage estimate per token, for `gae`.
        aggregation: How per-token losses become one number.
        lr: Learning rate of AdamW.
        weight_decay: Of AdamW.
        max_grad_norm: Gradients are scaled down to this norm.
        reward: `verifier`, or `model` for a preference-trained reward model on `reward_domain`.
        reward_domain: The domain that the reward model judges.
        warmup_steps: Supervised steps before the first rollout. Default: 300 for the embedded model, else 0.
        warmup_batch_size: Prompts per such step.
        warmup_lr: Learning rate of such steps.
        seed: Of weights, warm-up and draws. Default: that of `seed_everything`.
        num_threads: CPU threads of a fit; results are the same on two machines only if it is. Default: PyTorch's.
    """

    def __init__(
        self,
        model_path: str | None = None,
        adv_estimator: Estimator = "grpo",
        num_generations: int = 8,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 5,
        ppo_epochs: int = 1,
        num_minibatches: int = 1,
        micro_batch_size: int | None = None,
        clip_low: float = 0.2,
        clip_high: float | None = None,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        value_coef: float = 0.5,
        value_clip: float | None = None,
        gamma: float = 1.0,
        lam: float = 1.0,
        aggregation: Aggregation = "token-mean",
        lr: float = 5e-4,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        reward: Literal["verifier", "model"] = "verifier",
        reward_domain: str = "sorting",
        warmup_steps: int | None = None,
        warmup_batch_size: int = 96,
        warmup_lr: float = 3e-3,
        seed: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        super().__init__()
        if adv_estimator != "gae" and num_generations < 2:
            raise ValueError(
                f"num_generations is {num_generations}, but {adv_estimator} compares the responses to a prompt with "
                "each other. Use at least 2, or gae."
            )
        self.save_hyperparameters()
        # One rollout is several optimiser steps: Lightning's automatic optimisation takes one per batch.
        self.automatic_optimization = False
        self.sampling = Sampling(num_generations, temperature, top_p, max_new_tokens)
        self.seed = run_seed() if seed is None else seed
        self.policy, self.tokenizer = built(model_path, value_head=adv_estimator == "gae", seed=self.seed)
        self.dataflex = DataFlexPoint()
        self.reference: Reference | None = None
        self.reward_model: RewardModel | None = None
        self.started = False
        self.num_calls = 0
        self.num_tokens = TokenCounts()
        self.frozen: dict[str, dict[str, Tensor]] = {}
        self.held_out_rates: list[SolveRates] = []

    def on_fit_start(self) -> None:
        """Make the starting policy, and the frozen models that go with it; a checkpoint has been read by now."""
        hp, rows = self.hparams, self.trainer.datamodule.prompts.train
        batch_size = self.trainer.datamodule.hparams.get("batch_size")
        if batch_size is not None and batch_size < hp.num_minibatches:
            raise ValueError(
                f"num_minibatches is {hp.num_minibatches} but a batch has {batch_size} prompts. "
                "Use more prompts or fewer minibatches."
            )
        torch.set_num_threads(hp.num_threads or torch.get_num_threads())
        num_steps = (0 if hp.model_path else 300) if hp.warmup_steps is None else hp.warmup_steps
        if num_steps and not self.started:
            rank_zero_info(f"Warm-up: {num_steps} supervised steps on the demonstrations of the train prompts.")
            warm_up(self.policy, self.tokenizer, rows, num_steps, hp.warmup_batch_size, hp.warmup_lr, self.seed)
        if hp.kl_coef and self.reference is None:
            self.reference = Reference(self.policy, state=self.frozen.get("reference"))
        if hp.reward == "model" and self.reward_model is None:
            self.reward_model = RewardModel(hp.reward_domain, seed=self.seed, state=self.frozen.get("reward_model"))
            if "reward_model" not in self.frozen:
                self.reward_model.fit(rows)
        self.started = True

    def on_train_start(self) -> None:
        # With dropout the policy that is trained would not be the one that generated, and every ratio would be off.
        self.policy.eval()

    def training_step(self, rows: list[Row], batch_idx: int) -> Tensor:
        self.num_calls = 0
        batch = self.rollout(rows)
        # Of the first rollouts of a step: a data scheduler may leave some out, and call for more.
        self.log_rollout(batch)
        # The data scheduler, if there is one, says here which samples count, and how much.
        return self.update(self.dataflex(batch))

    def rollout(self, rows: list[Row], num_generations: int | None = None) -> Batch:
        """Responses to the prompts, and all that the loss needs to know of them.

        Args:
            rows: The prompts.
            num_generations: Responses to each. Default: the hyperparameter.
        """
        hp = self.hparams
        sampling = replace(self.sampling, num_generations=num_generations or hp.num_generations)
        batch = generated(self.policy, self.tokenizer, rows, sampling, self.draw_seed(self.num_calls))
        self.num_calls += 1
        self.num_tokens.generated += self.over_ranks(batch["response_mask"].sum())
        batch |= described(self.policy, batch, hp.temperature, hp.micro_batch_size)
        if self.reference:
            batch["ref_log_probs"] = self.reference.log_probs(batch, hp.temperature, hp.micro_batch_size)
        batch |= self.rewards([row for row in rows for _ in range(sampling.num_generations)], batch)
        return batch | advantage_fields(batch, hp.adv_estimator, sampling.num_generations, gamma=hp.gamma, lam=hp.lam)

    def rewards(self, samples: list[Row], batch: Batch) -> Batch:
        """`solved` (N,), and `rm_scores` (N, L), the reward at the last token. Override it for another reward.

        Args:
            samples: The prompt of each response.
            batch: The responses.
        """
        scores = self.scores(samples, batch["responses"])
        rewards = self.reward_model.rewards(samples, batch["responses"], scores) if self.reward_model else scores
        return {"solved": (scores >= SOLVED).float(), "rm_scores": at_last_token(rewards, batch["response_mask"])}

    def scores(self, rows: Sequence[Row], responses: Sequence[str]) -> Tensor:
        """What the verifier says of each response, (N,)."""
        verifier = self.trainer.datamodule.verifier
        return torch.tensor([verifier(row, text) for row, text in zip(rows, responses)], device=self.device)

    def update(self, batch: Batch) -> Tensor:
        """Every optimiser step of one rollout batch. Returns the mean loss, detached."""
        # Those that the policy is run on, whether or not they count.
        tokens = batch["attention_mask"][:, -batch["response_mask"].shape[1] :].sum()
        self.num_tokens.trained += self.over_ranks(tokens) * self.hparams.ppo_epochs
        self.log_dict(vars(self.num_tokens), batch_size=1)
        generator = torch.Generator().manual_seed(self.draw_seed())
        parts = [
            self.optimizer_step_on(sliced(batch, rows))
            for _ in range(self.hparams.ppo_epochs)
            for rows in minibatches(batch["uid"], self.hparams.num_minibatches, generator)
        ]
        means = {f"loss/{name}": torch.stack([p[name] for p in parts]).mean() for name in parts[0]}
        self.log_dict(means, sync_dist=True, batch_size=len(batch["uid"]))
        return means["loss/total"]

    def optimizer_step_on(self, minibatch: Batch) -> dict[str, Tensor]:
        optimizer, mask = self.optimizers(), minibatch["response_mask"]
        # One denominator for all micro-batches of the step, so that the gradient does not depend on the cut.
        denominator = loss_denominator(mask, self.hparams.aggregation)
        # The ranks run as many backward passes as the one with the most samples.
        count = torch.tensor(num_micro_batches(len(mask), self.hparams.micro_batch_size), device=self.device)
        parts = []
        for micro_batch in micro_batches(minibatch, int(self.trainer.strategy.reduce(count, reduce_op="max"))):
            out = self.loss(micro_batch, denominator)
            self.manual_backward(out.loss)
            parts.append({"total": out.loss.detach(), **out.parts})
        self.clip_gradients(optimizer, self.hparams.max_grad_norm, "norm")
        optimizer.step()
        optimizer.zero_grad()
        return {name: torch.stack([p[name] for p in parts]).sum() for name in parts[0]}

    def loss(self, batch: Batch, denominator: Tensor) -> PolicyLoss:
        hp, mask = self.hparams, batch["response_mask"]
        now = self.policy(batch["input_ids"], batch["attention_mask"], mask.shape[1], hp.temperature)
        out = policy_loss(
            now.log_probs,
            batch["old_log_probs"],
            batch["advantages"],
            mask,
            rollout_is_weights=batch.get("rollout_is_weights"),
            clip_low=hp.clip_low,
            clip_high=hp.clip_high,
            aggregation=hp.aggregation,
            denominator=denominator,
            ref_log_probs=batch.get("ref_log_probs"),
            kl_coef=hp.kl_coef,
            entropies=now.entropies,
            entropy_coef=hp.entropy_coef,
        )
        if now.values is None:
            return out
        value = value_loss(now.values, batch, aggregation=hp.aggregation, denominator=denominator, clip=hp.value_clip)
        return PolicyLoss(out.loss + hp.value_coef * value, {**out.parts, "value": value.detach()})

    def over_ranks(self, count: Tensor) -> int:
        """The sum of all ranks' counts. A collective."""
        return int(self.trainer.strategy.reduce(count, reduce_op="sum"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)

    def draw_seed(self, call: int = 0) -> int:
        """Of the draws of this step on this rank: a resumed run draws what the run without a stop would have.

        Args:
            call: Counts the rollouts of a step.
        """
        place = f"{self.seed}-{self.global_step}-{self.global_rank}" + (f"-{call}" if call else "")
        return random.Random(place).getrandbits(63)

    def solve_rates(self, rows: Sequence[Row]) -> SolveRates:
        """Of greedy responses to these prompts, on this rank."""
        greedy = Sampling(temperature=0.0, max_new_tokens=self.hparams.max_new_tokens)
        batch = generated(self.policy, self.tokenizer, rows, greedy, seed=0)
        solved = (self.scores(rows, batch["responses"]) >= SOLVED).float()
        return SolveRates.of(self.trainer.datamodule.domains, batch["domain"], solved)

    def validation_step(self, rows: list[Row], batch_idx: int) -> None:
        self.held_out_rates.append(self.solve_rates(rows))

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.log_held_out("val/")

    def on_test_epoch_end(self) -> None:
        self.log_held_out("test/")

    def log_held_out(self, prefix: str) -> None:
        rates, self.held_out_rates = self.held_out_rates, []
        self.log_rates(sum(rates[1:], rates[0]), prefix, batch_size=1)

    def log_rollout(self, batch: Batch) -> None:
        mask, size = batch["response_mask"], len(batch["uid"])
        self.log_rates(SolveRates.of(self.trainer.datamodule.domains, batch["domain"], batch["solved"]), "", size)
        entropy = torch.where(mask.bool(), batch["entropies"], 0.0).sum()
        sums = torch.stack([batch["rm_scores"].sum(), entropy, mask.sum(), torch.tensor(size, device=mask.device)])
        # Sums over ranks, because a mean of the ranks' means is none of the samples.
        rewards, entropies, tokens, samples = self.trainer.strategy.reduce(sums, reduce_op="sum").tolist()
        means = {"reward": rewards / samples, "response_length": tokens / samples, "entropy": entropies / tokens}
        self.log_dict(means, batch_size=size)

    def log_rates(self, rates: SolveRates, prefix: str, batch_size: int) -> None:
        rates = rates.over_ranks(self.trainer.strategy)
        # The same on every rank; of an epoch's values Lightning wants to hear that all the same.
        log = functools.partial(self.log, batch_size=batch_size, sync_dist=bool(prefix))
        log(f"{prefix}solve_rate", rates.overall, prog_bar=True)
        for domain, rate in rates.per_domain.items():
            log(f"{prefix}solve_rate/{domain}", rate)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        models = {"reference": self.reference, "reward_model": self.reward_model}
        checkpoint["num_tokens"] = vars(self.num_tokens).copy()
        checkpoint["frozen"] = {name: model.state_dict() for name, model in models.items() if model is not None}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.started, self.frozen = True, checkpoint["frozen"]
        self.num_tokens = TokenCounts(**checkpoint["num_tokens"])
