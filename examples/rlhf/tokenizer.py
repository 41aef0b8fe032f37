"""Text to token ids and back: a character tokenizer, and any Hugging Face tokenizer behind the same interface."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


class Prompts(NamedTuple):
    """Prompts of one batch, padded on the left so that every response starts in the same column.

    Attributes:
        input_ids: (B, P) integers.
        attention_mask: (B, P), 0 for padding.
    """

    input_ids: Tensor
    attention_mask: Tensor


class Tokenizer(Protocol):
    """What the example asks of a tokenizer."""

    pad_id: int
    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever starts one."""

    def encode_answer(self, text: str) -> list[int]:
        """Token ids of an answer, the end token included."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, without special tokens."""


class CharTokenizer:
    """One token per character, and pad, bos, eos and unknown.

    Example:
        >>> tokenizer = CharTokenizer()
        >>> tokenizer.encode("1+1=")[0] == tokenizer.bos_id, tokenizer.decode(tokenizer.encode("1+1="))
        (True, '1+1=')
    """

    pad_id, bos_id, eos_id, unknown_id = range(4)
    vocab_size = 4 + len(CHARACTERS)

    def __init__(self) -> None:
        self._id = {character: 4 + i for i, character in enumerate(CHARACTERS)}

    def encode(self, text: str) -> list[int]:
        return [self.bos_id, *self._ids(text)]

    def encode_answer(self, text: str) -> list[int]:
        return [*self._ids(text), self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(CHARACTERS[i - 4] for i in ids if i >= 4)

    def _ids(self, text: str) -> list[int]:
        return [self._id.get(character, self.unknown_id) for character in text]


class HFTokenizer:
    """The tokenizer of a Hugging Face checkpoint; a prompt goes through its chat template if it has one."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"The tokenizer in {path!r} has no end token. Set its `eos_token` and save it again.")
        self.eos_id: int = self.tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        self.vocab_size = len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer(text)["input_ids"]
        turns = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]

    def encode_answer(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def left_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> Prompts:
    """Token ids of unequal lengths as one batch, padding first.

    Example:
        >>> left_padded([[5], [6, 7]], pad_id=0)
        Prompts(input_ids=tensor([[0, 5],
                [6, 7]]), attention_mask=tensor([[0, 1],
                [1, 1]]))
    """
    width = max(len(ids) for ids in sequences)
    padding = [width - len(ids) for ids in sequences]
    input_ids = [[pad_id] * n + list(ids) for n, ids in zip(padding, sequences)]
    attention_mask = [[0] * n + [1] * len(ids) for n, ids in zip(padding, sequences)]
    return Prompts(torch.tensor(input_ids), torch.tensor(attention_mask))
