"""Responses: how they are generated, where they end, and what the policy says about them."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.rlhf.batches import Batch
from examples.rlhf.policy import Policy
from examples.rlhf.tasks import Row
from examples.rlhf.tokenizer import Tokenizer, left_padded


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; temperature 0 is greedy."""

    num_generations: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 8

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}. Use 0 for greedy responses, or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}. Use a number above 0 and at most 1; 1 keeps every token.")
        if self.temperature == 0 and self.num_generations > 1:
            raise ValueError(
                f"temperature is 0, so that all {self.num_generations} responses to a prompt would be the same one. "
                "Use a positive temperature, or num_generations 1."
            )
        if self.num_generations < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"num_generations is {self.num_generations} and max_new_tokens is {self.max_new_tokens}. "
                "Use at least 1 of each."
            )


@torch.no_grad()
def generated(policy: Policy, tokenizer: Tokenizer, rows: Sequence[Row], sampling: Sampling, seed: int) -> Batch:
    """Responses to each row's prompt, `num_generations` in a row per prompt.

    The draws depend on `seed` alone, and the global generator is left as it was.

    Returns:
        `input_ids` and `attention_mask` (N, P + L), prompts first, `response_mask` (N, L), and the lists
        `domain`, `uid` (the prompt ids) and `responses` (the texts).
    """
    device = next(policy.parameters()).device
    prompts = left_padded([tokenizer.encode(row["prompt"]) for row in rows], tokenizer.pad_id)
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        input_ids = policy.model.generate(
            input_ids=prompts.input_ids.to(device),
            attention_mask=prompts.attention_mask.to(device),
            do_sample=bool(drawn),
            num_return_sequences=sampling.num_generations,
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=tokenizer.pad_id,
            eos_token_id=policy.stop_ids,
            **drawn,
        )
    responses = input_ids[:, prompts.input_ids.shape[1] :]
    mask = response_mask(responses, policy.stop_ids)
    prompt_mask = prompts.attention_mask.to(device).repeat_interleave(sampling.num_generations, 0)
    samples = [row for row in rows for _ in range(sampling.num_generations)]
    return {
        "input_ids": input_ids,
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "response_mask": mask,
        "responses": [tokenizer.decode(ids[: int(n)].tolist()) for ids, n in zip(responses, mask.sum(1))],
        "domain": [row["domain"] for row in samples],
        "uid": [row["prompt_id"] for row in samples],
    }


def response_mask(responses: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """(N, L) integers: 1 up to and including the first token that ends a response.

    Example:
        >>> response_mask(torch.tensor([[7, 2, 0, 2], [7, 7, 7, 7]]), stop_ids=[2])
        tensor([[1, 1, 0, 0],
                [1, 1, 1, 1]])
    """
    ends = torch.isin(responses, torch.tensor(stop_ids, device=responses.device)).long()
    return (ends.cumsum(1) - ends == 0).long()


def described(policy: Policy, batch: Batch, temperature: float, micro_batch_size: int | None = None) -> Batch:
    """The policy's `old_log_probs` and `entropies` of a batch's responses, and its `values` if it has a value head.

    One forward pass, in pieces of `micro_batch_size` samples (default: all at once), under the temperature that
    drew the responses. A top-p cut is not in them: log-probabilities are those of the whole distribution, as usual.
    """
    num_samples, num_response = batch["response_mask"].shape
    size = micro_batch_size or num_samples
    pieces = zip(batch["input_ids"].split(size), batch["attention_mask"].split(size))
    with torch.no_grad():
        outputs = [policy(ids, mask, num_response, temperature) for ids, mask in pieces]
    fields = {
        "old_log_probs": torch.cat([o.log_probs for o in outputs]),
        "entropies": torch.cat([o.entropies for o in outputs]),
    }
    if policy.value_head is not None:
        fields["values"] = torch.cat([o.values for o in outputs])
    return fields


class Reference:
    """A frozen copy of the policy, for the KL term.

    It is no `nn.Module`, so that it is no part of the module that owns it: neither an optimiser, nor DDP, nor a
    state dict sees it.
    """

    def __init__(self, policy: Policy, state: dict[str, Tensor] | None = None) -> None:
        self.policy = copy.deepcopy(policy).requires_grad_(False)
        self.state_dict = self.policy.state_dict
        if state is not None:
            self.policy.load_state_dict(state)

    def log_probs(self, batch: Batch, temperature: float, micro_batch_size: int | None = None) -> Tensor:
        """(N, L) of the batch's responses."""
        self.policy.to(batch["input_ids"].device)
        return described(self.policy, batch, temperature, micro_batch_size)["old_log_probs"]


def run_seed() -> int:
    """The seed of `seed_everything`, or 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
