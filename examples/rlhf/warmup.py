"""Supervised steps that take a random model to the point where reinforcement learning has something to work on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.rlhf.policy import Policy, positions
from examples.rlhf.tasks import Row
from examples.rlhf.tokenizer import Tokenizer, left_padded

IGNORED = -100
RAMP, DECAY = 0.1, 0.6
"""Shares of the steps over which the learning rate rises from 0, and falls to 0 again."""


def warm_up(
    policy: Policy, tokenizer: Tokenizer, rows: Sequence[Row], num_steps: int, batch_size: int, lr: float, seed: int
) -> None:
    """Imitate the demonstrations, in place; the order of the rows depends on `seed` alone."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        done = step / num_steps
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (done + 0.01) / RAMP, (1 - done) / DECAY)
        drawn = torch.randint(len(rows), (batch_size,), generator=generator).tolist()
        imitation_loss(policy, tokenizer, [rows[i] for i in drawn]).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def imitation_loss(policy: Policy, tokenizer: Tokenizer, rows: Sequence[Row]) -> Tensor:
    """Mean cross-entropy, in nats, of the tokens of the demonstrations, each after its prompt."""
    answers = [tokenizer.encode_answer(row["demonstration"]) for row in rows]
    texts = [tokenizer.encode(row["prompt"]) + answer for row, answer in zip(rows, answers)]
    input_ids, attention_mask = (x.to(policy.model.device) for x in left_padded(texts, tokenizer.pad_id))
    width = max(len(answer) for answer in answers)
    is_answer = torch.arange(width) >= width - torch.tensor([len(answer) for answer in answers])[:, None]
    labels = torch.where(is_answer.to(input_ids.device), input_ids[:, -width:], IGNORED)
    logits = policy.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions(attention_mask),
        logits_to_keep=width + 1,
        use_cache=False,
    ).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
