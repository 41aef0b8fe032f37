"""A reward learned from preferences: for one domain, right answers against corrupted ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import LlamaModel

from examples.rlhf.policy import embedded_model, positions
from examples.rlhf.tasks import Row
from examples.rlhf.tokenizer import CharTokenizer, left_padded

SIZES = {"hidden_size": 64, "intermediate_size": 192}
"""Half as wide as the policy: to judge an answer takes less than to find it."""

CENTRING = 0.01
"""Weight of the term that keeps rewards around 0: preferences say nothing about their level."""


class RewardModel:
    """Judges responses to prompts of one domain.

    It is no `nn.Module`, so that it is no part of the module that owns it: neither an optimiser, nor DDP, nor a
    state dict sees it.

    Source: Bradley and Terry 1952, as used by Ouyang et al. 2022, arXiv:2203.02155, section 3.5; the centring term
    is that of Eisenstein et al. 2023, arXiv:2312.09244.
    """

    def __init__(self, domain: str, *, seed: int = 0, state: dict[str, Tensor] | None = None) -> None:
        self.domain, self.seed = domain, seed
        self.tokenizer = CharTokenizer()
        self.scorer = _Scorer(embedded_model(seed, **SIZES).model)
        self.state_dict = self.scorer.state_dict
        if state is not None:
            self.scorer.load_state_dict(state)
            self.scorer.requires_grad_(False)

    def fit(self, rows: Sequence[Row], *, num_steps: int = 300, batch_size: int = 64, lr: float = 2e-3) -> None:
        """Learn from pairs that are made of these prompts."""
        rows = [row for row in rows if row["domain"] == self.domain]
        if not rows:
            raise ValueError(f"No train prompt is of domain {self.domain!r}. Set `reward_domain` to one that is.")
        rng = random.Random(self.seed)
        optimizer = torch.optim.AdamW(self.scorer.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=num_steps, pct_start=0.1)
        for _ in range(num_steps):
            drawn = rng.choices(rows, k=batch_size)
            answers = [row["answer"] for row in drawn]
            right, wrong = self(drawn * 2, answers + [corrupted(answer, rng) for answer in answers]).chunk(2)
            loss = -logsigmoid(right - wrong).mean() + CENTRING * (right + wrong).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.scorer.requires_grad_(False)

    def __call__(self, rows: Sequence[Row], responses: Sequence[str]) -> Tensor:
        """(N,) logits: how much better than an average answer each response is."""
        tokenizer = self.tokenizer
        texts = [tokenizer.encode(row["prompt"]) + tokenizer.encode_answer(text) for row, text in zip(rows, responses)]
        device = next(self.scorer.parameters()).device
        return self.scorer(*(x.to(device) for x in left_padded(texts, tokenizer.pad_id)))

    def rewards(self, rows: Sequence[Row], responses: Sequence[str], scores: Tensor) -> Tensor:
        """(N,) rewards in 0..1: the model's on its domain, and the given `scores` on every other."""
        mine = [i for i, row in enumerate(rows) if row["domain"] == self.domain]
        if not mine:
            return scores
        self.scorer.to(scores.device)
        judged = self([rows[i] for i in mine], [responses[i] for i in mine])
        return scores.index_copy(0, torch.tensor(mine, device=scores.device), judged.sigmoid().to(scores.dtype))


class _Scorer(nn.Module):
    def __init__(self, trunk: LlamaModel) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        trunk = self.trunk(input_ids, attention_mask, position_ids=positions(attention_mask), use_cache=False)
        return self.head(trunk.last_hidden_state[:, -1]).squeeze(-1)


def corrupted(answer: str, rng: random.Random) -> str:
    """A wrong answer that looks like a right one: a character replaced, dropped or doubled, or two swapped.

    Example:
        >>> corrupted("1234", random.Random(0)) == "1234"
        False
    """
    while True:
        i = rng.randrange(len(answer))
        alike = "0123456789" if answer[i].isdigit() else "abcdefgh"
        candidate = rng.choice(
            [
                answer[:i] + rng.choice(alike) + answer[i + 1 :],
                answer[:i] + answer[i + 1 :],
                answer[:i] + answer[i] + answer[i:],
                answer[:i] + answer[i + 1 : i + 2] + answer[i : i + 1] + answer[i + 2 :],
            ]
        )
        if candidate != answer:
            return candidate
