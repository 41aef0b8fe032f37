"""One reading of any rollout batch: what its fields mean."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.fields import Fields, is_per_sample
from lightning_dataflex.core.home import sent
from lightning_dataflex.core.ids import ToldApart, told_apart
from lightning_dataflex.core.numbers import as_numbers, dense
from lightning_dataflex.functional import scoring
from lightning_dataflex.functional.blocks import blank_padding
from lightning_dataflex.functional.groups import group_index
from lightning_dataflex.functional.tokens import mask_read, num_valid


class RolloutBatch(Fields):
    """A rollout batch of any type, read by the field names of this project.

    Reads a dict or any other mapping (Hugging Face's `BatchEncoding` and `ModelOutput` included), a `TensorDict`,
    a dataclass, a NamedTuple, any object with attributes, and an object with `.batch` and `.non_tensor_batch`
    as verl's `DataProto`. Writing puts the value into the very object that was given.

    Args:
        source: The batch.
        fields: The batch's own names, `{"rm_scores": "rewards"}` where `rm_scores` is called `rewards` there.

    Example:
        >>> batch = RolloutBatch({"rewards": torch.tensor([1.0, 0.0])}, fields={"rm_scores": "rewards"})
        >>> batch["rm_scores"], batch.batch["rm_scores"], batch.non_tensor_batch["rm_scores"]
        (tensor([1., 0.]), tensor([1., 0.]), array([1., 0.], dtype=float32))
        >>> batch["uid"] = ["a", "a"]
        >>> batch.source["uid"]
        ['a', 'a']
    """

    @classmethod
    def of(cls, batch: Any, fields: Mapping[str, str] | None = None) -> RolloutBatch:
        """The batch itself if it is a `RolloutBatch`, else one that reads it."""
        return batch if isinstance(batch, RolloutBatch) else RolloutBatch(batch, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._forget()

    def _forget(self) -> None:
        for name in READ_ONCE:
            vars(self).pop(name, None)

    _lowest: Tensor | None = None
    """What `lowest_in_mask` gives: it goes with the mask, checked or not."""

    def __len__(self) -> int:
        return self.num_samples

    def require(self, names: Iterable[str]) -> None:
        """Raise a ValueError for the first field that the batch lacks, or that has another number of samples."""
        for name in names:
            if name not in self:
                raise ValueError(self.missing(name))
            value = self.original(name)
            if is_per_sample(value):
                self.check_rows(name, value)

    def after(self, source: Any) -> RolloutBatch:
        """This reading of a copy with other decisions in it: what the original fields say is not read again.

        Args:
            source: What `replaced` gave.

        Example:
            >>> batch = RolloutBatch({"uid": ["a", "b", "a"], "response_mask": torch.ones(3, 2)})
            >>> batch.groups is batch.after(batch.replaced({"rollout_is_weights": torch.ones(3, 2)})).groups
            True
        """
        later = RolloutBatch(source, self.fields)
        vars(later).update({name: value for name, value in vars(self).items() if name in READ_ONCE})
        return later

    @functools.cached_property
    def response_mask(self) -> Tensor | None:
        """(N, L) bool, the valid tokens, before any decision blanked rows of it; None where the batch has none."""
        mask, lowest = self._read_mask()
        self.check_mask(lowest)
        return mask

    def lowest_in_mask(self) -> Tensor | None:
        """The least number that stands in the mask, as long as nobody has checked it; None where nothing is to check.

        It reads `response_mask`, too. For whoever copies that number from an accelerator together with others, and
        hands it to `check_mask`: each copy waits for all work before it.
        """
        if "response_mask" not in vars(self):
            self.response_mask, self._lowest = self._read_mask()
        return self._lowest

    def check_mask(self, lowest: Tensor | None) -> None:
        """Raise a ValueError unless the least that stands in the mask is at least 0; None is nothing to check."""
        if lowest is not None and not lowest >= 0:
            mask = as_numbers(self.original("response_mask"), "response_mask")
            odd = mask[~(mask >= 0)][0].item()
            self._forget()
            raise ValueError(f"response_mask holds {odd}. Give 1 for a valid token and 0 for any other.")
        self._lowest = None

    def _read_mask(self) -> tuple[Tensor | None, Tensor | None]:
        """The mask, and of one of numbers the least."""
        mask = self.original("response_mask")
        if mask is None:
            return None, None
        mask = _exact_device(as_numbers(mask, "response_mask"))
        if mask.dim() == 1 and not len(mask):
            mask = mask.reshape(0, 1)
        if mask.dim() != 2:
            raise ValueError(f"response_mask has shape {tuple(mask.shape)}. It must be (samples, response tokens).")
        if mask.dtype == torch.bool:
            return mask, None
        if not mask.numel():
            return mask.bool(), None
        valid, self.num_tokens, lowest = mask_read(mask)
        return valid, lowest

    @property
    def token_mask(self) -> Tensor:
        """`response_mask`, or for a batch that has none one token per sample, (N, 1)."""
        return self.has_tokens[:, None] if self.response_mask is None else self.response_mask

    @functools.cached_property
    def num_samples(self) -> int:
        """N."""
        if is_per_sample(self.original("response_mask")):
            return len(self.original("response_mask"))
        for name in ("num_tokens", "uid", "rm_scores", "advantages", "old_log_probs", *self.keys()):
            if is_per_sample(self.get(name)):
                return len(self[name])
        return 0

    @functools.cached_property
    def num_tokens(self) -> Tensor:
        """(N,) int64 valid tokens of each sample; 1 each where the batch says nothing of tokens."""
        if self.response_mask is not None:
            return num_valid(self.response_mask)
        if "num_tokens" in self:
            return self.tensor("num_tokens").long()
        return torch.ones(self.num_samples, dtype=torch.int64)

    @functools.cached_property
    def has_tokens(self) -> Tensor:
        """(N,) bool: the samples with a valid token."""
        return self.num_tokens > 0

    @functools.cached_property
    def outcomes(self) -> Tensor:
        """(N,) reward of each sample, NaN where it cannot be scored."""
        return scoring.outcome(self.tensor("rm_scores"), self.response_mask, length=self.num_tokens)

    @functools.cached_property
    def group_ids(self) -> Tensor:
        """(N,) int64, equal for samples of one group; see `stable_ids`."""
        return self._there(self.told_apart.ids)

    @functools.cached_property
    def groups(self) -> tuple[Tensor, int]:
        """The dense group index (N,) of each sample, and the number of groups; see `group_index`."""
        if self.told_apart.groups is None:
            return group_index(self.group_ids)
        index, num_groups = self.told_apart.groups
        return self._there(index), num_groups

    @functools.cached_property
    def told_apart(self) -> ToldApart:
        """The groups where the batch has its `uid`: for texts in main memory."""
        uid = self.original("uid")
        if uid is None:
            raise ValueError(self.missing("uid"))
        self.check_rows("uid", uid)
        return told_apart(uid)

    def with_local_ids(self) -> RolloutBatch:
        """This reading for those who compare no other batch's groups: `group_ids` are then numbers from 0, not stable.

        Example:
            >>> RolloutBatch({"uid": ["a", "b", "a"]}).with_local_ids().group_ids
            tensor([0, 1, 0])
        """
        if "uid" not in self or self.told_apart.groups is None:
            return self
        found = self.after(self.source)
        found.group_ids, _ = self.groups
        return found

    def _there(self, index: Tensor) -> Tensor:
        return sent(index, self.num_tokens.device)

    def tensor(self, name: str) -> Tensor:
        """A numeric field as a tensor, (N,) or (N, L), before any decision replaced it; without gradient.

        Where the mask is: what a verifier gives lies in main memory, and the tokens on an accelerator.
        """
        value = self.original(name)
        if value is None:
            raise ValueError(self.missing(name))
        value = _exact_device(as_numbers(value, name))
        self.check_rows(name, value)
        mask = self.response_mask
        if value.dim() not in (1, 2) or (mask is not None and value.dim() == 2 and value.shape != mask.shape):
            tokens = "response tokens" if mask is None else mask.shape[1]
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}. It must be (samples,) or (samples, response tokens), "
                f"here ({self.num_samples},) or ({self.num_samples}, {tokens})."
            )
        return value if mask is None else sent(value, mask.device)

    def tokens(self, name: str) -> Tensor:
        """A field of token numbers as a tensor (N, L); (N,) is what other ranks have sent of it, in place of (N, L)."""
        value = self.tensor(name)
        if value.dim() == 1 and self.response_mask is not None:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}. It must have a number for each response token, "
                f"{tuple(self.response_mask.shape)}."
            )
        return value

    def spread_advantages(self, values: Tensor) -> Tensor:
        """Advantages (N,) in the shape, the number type and the place of the batch's own, 0 in padding."""
        like = as_numbers(self.original("advantages"), "advantages")
        values = sent(values, like.device).to(like.dtype if like.is_floating_point() else torch.float32)
        return values if like.dim() == 1 else blank_padding(values[:, None], self.token_mask)

    def check_rows(self, name: str, value: Any) -> None:
        """Raise a ValueError unless a field has a row for each sample."""
        value = dense(value, name) if isinstance(value, Tensor) else value
        rows = len(value) if is_per_sample(value) or isinstance(value, range) else None
        if rows != self.num_samples:
            shown = "one value" if rows is None else f"{rows} rows"
            raise ValueError(
                f"{name} has {shown} but the rollout batch has {self.num_samples} samples. Give one row per sample."
            )


_ONCE = [name for name, value in vars(RolloutBatch).items() if isinstance(value, functools.cached_property)]
READ_ONCE = (*_ONCE, "_lowest")
"""What a reading remembers of the original fields."""


def by_prompt(batch: RolloutBatch) -> RolloutBatch:
    """The batch with a `prompt_id`: under its mapped name, or where it has none of that name under its own.

    What the loader calls a prompt's id, the rollout may call otherwise.

    Example:
        >>> by_prompt(RolloutBatch({"uid": ["a"]}, fields={"prompt_id": "index"}))["prompt_id"]
        ['a']
    """
    if "prompt_id" in batch:
        return batch
    return RolloutBatch(batch.source, {key: value for key, value in batch.fields.items() if key != "prompt_id"})


def _exact_device(tensor: Tensor) -> Tensor:
    # Statistics are summed in float64, which Apple's GPUs do not have.
    return tensor.cpu() if tensor.device.type == "mps" else tensor
