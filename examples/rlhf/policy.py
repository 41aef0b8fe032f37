"""The policy: a Hugging Face causal language model that also tells what it thinks of given responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from examples.rlhf.tokenizer import CharTokenizer, HFTokenizer, Tokenizer

EMBEDDED = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    # A mask-free kernel does not pay at a width of 20 tokens; the plain one is the fastest here.
    "attn_implementation": "eager",
}
"""Sizes of the embedded model: half a million parameters."""


class TokenOutputs(NamedTuple):
    """What the policy says about the tokens of given responses, each (N, L).

    Attributes:
        log_probs: Of the tokens.
        entropies: Of the distributions they were drawn from, in nats.
        values: Of the states before them; None without a value head.
    """

    log_probs: Tensor
    entropies: Tensor
    values: Tensor | None


class Policy(nn.Module):
    """A causal language model, with a value head for estimators that need one."""

    def __init__(self, model: PreTrainedModel, *, stop_ids: list[int], value_head: bool = False) -> None:
        super().__init__()
        self.model = model
        self.stop_ids = stop_ids
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_response: int, temperature: float) -> TokenOutputs:
        """Log-probabilities, entropies and values of the last `num_response` tokens.

        Args:
            input_ids: (N, P + L) prompts, padded on the left, then responses.
            attention_mask: (N, P + L), 0 for padding on either side.
            temperature: The one that the responses were drawn with; 1 when they were not drawn.
        """
        with _inputs_of(self.model.get_output_embeddings()) as states:
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=positions(attention_mask),
                # The logits at one token are about the next, so that the prompt's last token belongs to the response.
                logits_to_keep=num_response + 1,
                use_cache=False,
            )
        log_p = (_full(outputs.logits[:, :-1]) / (temperature or 1.0)).log_softmax(-1)
        log_probs = log_p.gather(-1, input_ids[:, -num_response:, None]).squeeze(-1)
        entropies = -(log_p.exp() * log_p).sum(-1)
        if self.value_head is None:
            return TokenOutputs(log_probs, entropies, None)
        hidden = states[0][:, -num_response - 1 : -1]
        return TokenOutputs(log_probs, entropies, _full(self.value_head(hidden)).squeeze(-1))


@contextmanager
def _inputs_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """What a layer is called with in the meantime.

    The model's own `output_hidden_states` gives none once the model was sent to another process.
    """
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _layer, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        handle.remove()


def positions(attention_mask: Tensor) -> Tensor:
    """Position of each token in its text, (N, T), whatever padding stands before it.

    Example:
        >>> positions(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 2, 3]])
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def built(model_path: str | None, *, value_head: bool, seed: int) -> tuple[Policy, Tokenizer]:
    """The policy and its tokenizer: those of a local checkpoint, or without a path the embedded ones."""
    if model_path is not None and not Path(model_path).is_dir():
        raise ValueError(f"model_path is {model_path!r}, which is no folder. Give one that `save_pretrained` wrote.")
    tokenizer: Tokenizer = CharTokenizer() if model_path is None else HFTokenizer(model_path)
    model = embedded_model(seed) if model_path is None else _loaded(model_path)
    stop_ids = model.generation_config.eos_token_id
    stop_ids = stop_ids if isinstance(stop_ids, list) else [] if stop_ids is None else [stop_ids]
    # A checkpoint's own generation settings (top_k, a repetition penalty) would make the responses come from
    # another distribution than the one whose log-probabilities are trained.
    model.generation_config = GenerationConfig()
    model.train()
    return Policy(model, stop_ids=sorted({tokenizer.eos_id, *stop_ids}), value_head=value_head), tokenizer


def embedded_model(seed: int, **sizes: int) -> LlamaForCausalLM:
    """A small Llama with random weights, the same for the same seed; the global generator is left as it was."""
    ids = {"vocab_size": CharTokenizer.vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**EMBEDDED, **ids, **sizes}))


def _loaded(model_path: str) -> PreTrainedModel:
    # Full precision weights, whatever the file holds: an RL step is too small to show in bfloat16. The Trainer's
    # `precision` decides what the arithmetic runs in. A checkpoint in another format could run code when it is read.
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, use_safetensors=True)


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
