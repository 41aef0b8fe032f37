"""GRPO on a module of your own: `python examples/minimal.py` trains a tiny policy to say its prompt backwards."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_dataflex import DataFlexCallback, DataFlexPoint
from lightning_dataflex.functional.advantages import grpo_advantages
from lightning_dataflex.functional.loss import policy_loss

DIGITS, LENGTH, GENERATIONS = 6, 2, 8
PROMPTS = torch.cartesian_prod(*[torch.arange(DIGITS)] * LENGTH)  # 00, 01, ... 55


class Backwards(LightningModule):
    def __init__(self):
        super().__init__()
        self.adv_estimator = "grpo"
        self.policy = nn.Sequential(nn.Linear(LENGTH * DIGITS, 64), nn.Tanh(), nn.Linear(64, LENGTH * DIGITS))
        self.dataflex = DataFlexPoint()

    def forward(self, prompts):  # (N, L) to the logits (N, L, DIGITS) of the response
        return self.policy(nn.functional.one_hot(prompts, DIGITS).flatten(1).float()).view(-1, LENGTH, DIGITS)

    @torch.no_grad()
    def rollout(self, prompts):
        prompts = prompts.repeat_interleave(GENERATIONS, 0)
        log_probs = self(prompts).log_softmax(-1)
        responses = torch.distributions.Categorical(logits=log_probs).sample()
        rewards = (responses == prompts.flip(-1)).all(-1).float()
        uid = torch.arange(len(prompts)) // GENERATIONS  # the samples of one prompt are a group
        return {
            "prompts": prompts,
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "old_log_probs": log_probs.gather(-1, responses[..., None])[..., 0],
            "rm_scores": rewards,
            "advantages": grpo_advantages(rewards, uid),
            "uid": uid,
        }

    def training_step(self, prompts, batch_idx):
        batch = self.dataflex(self.rollout(prompts))  # the one line: which samples count, and how much
        log_probs = self(batch["prompts"]).log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]
        names = ("old_log_probs", "advantages", "response_mask")
        return policy_loss(log_probs, *map(batch.get, names), rollout_is_weights=batch.get("rollout_is_weights")).loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


if __name__ == "__main__":
    seed_everything(0)
    module = Backwards()
    select = DataFlexCallback("select", scorer="group_solve_rate", actuator="threshold_band", drop="rows")
    print(f"solve rate before: {module.rollout(PROMPTS)['rm_scores'].mean():.2f}")
    trainer = Trainer(max_epochs=15, accelerator="cpu", callbacks=[select], logger=False, enable_checkpointing=False)
    trainer.fit(module, DataLoader(PROMPTS, batch_size=12, shuffle=True))
    print(f"solve rate after:  {module.rollout(PROMPTS)['rm_scores'].mean():.2f}")
