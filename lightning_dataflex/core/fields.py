"""The fields of any rollout batch by their names: the one place that knows what they are called."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lightning_dataflex.core.containers import ORIGINAL, as_array, as_tensor, copy_with, is_batch, stores, write

FIELDS = (
    "response_mask",
    "advantages",
    "rm_scores",
    "old_log_probs",
    "entropies",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "rollout_step",
    "uid",
    "prompt_id",
    "domain",
    "rollout_is_weights",
)
"""The fields of a rollout batch."""

ALIASES = {"rm_scores": "token_level_scores", "ref_log_probs": "ref_log_prob", "prompt_id": "uid"}
"""The second name under which a batch may carry a field: verl's; prompts whose group is named after them."""

ELSEWHERE = {
    "response_mask": ("completion_mask", "action_mask"),
    "advantages": ("advantage", "adv"),
    "rm_scores": ("rewards", "reward", "scores", "score", "token_level_rewards"),
    "old_log_probs": ("old_per_token_logps", "old_logprobs", "action_log_probs", "old_logps"),
    "entropies": ("entropys", "entropy"),
    "ref_log_probs": ("ref_per_token_logps", "base_action_log_probs", "ref_logprobs", "ref_logps"),
    "rollout_log_probs": ("sampling_per_token_logps", "rollout_logprobs", "sampling_logprobs"),
    "teacher_log_probs": ("teacher_per_token_logps", "teacher_logprobs", "teacher_logps"),
    "uid": ("prompt_id", "group_id", "group_ids", "group_index"),
    "prompt_id": ("index", "prompt_index", "problem_id"),
    "domain": ("data_source", "source", "domains", "dataset"),
}
"""What fields are called by verl, TRL, OpenRLHF and others."""
ALIKE = 0.85
"""How alike two names must be that differ in a letter, and not in what they mean."""


class Fields:
    """What a batch of any type holds, by the field names of this project.

    Args:
        source: The batch.
        fields: The batch's own names, `{"rm_scores": "rewards"}` where `rm_scores` is called `rewards` there.

    Raises:
        TypeError: It is nothing that can hold fields.

    Example:
        >>> batch = Fields({"rewards": [1.0, 0.0], "step": 3}, fields={"rm_scores": "rewards"})
        >>> batch["rm_scores"], "uid" in batch, batch.keys()
        ([1.0, 0.0], False, ['rewards', 'step'])
    """

    def __init__(self, source: Any, fields: Mapping[str, str] | None = None) -> None:
        check_batch(source)
        self.source = source
        self.fields = dict(fields or {})

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._found(name) is not None

    def __getitem__(self, name: str) -> Any:
        found = self._found(name)
        if found is None:
            raise KeyError(self.missing(name))
        store, key = found
        return store[key]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __setitem__(self, name: str, value: Any) -> None:
        write(self.source, self.fields.get(name, name), value)

    def keys(self) -> list[str]:
        """Field names as the batch has them."""
        return [key for store in stores(self.source) for key in store]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.keys()))})"

    @property
    def batch(self) -> FieldView:
        """The fields as tensors, where they can be: `.batch["advantages"]`."""
        return FieldView(self, lambda name: as_tensor(self[name]))

    @property
    def non_tensor_batch(self) -> FieldView:
        """The fields as NumPy arrays: `.non_tensor_batch["uid"]`."""
        return FieldView(self, lambda name: as_array(self[name]))

    def _found(self, name: str) -> tuple[Any, str] | None:
        held = stores(self.source)
        # A mapped field is read under that name alone: another that happens to be there was not asked for.
        for key in (self.fields[name],) if name in self.fields else (name, ALIASES.get(name)):
            for store in held:
                if key is not None and key in store:
                    return store, key
        return None

    def missing(self, name: str) -> str:
        """What to tell the user when a field is missing."""
        has = [str(key) for key in self.keys() if not str(key).startswith(ORIGINAL)]
        if (mapped := self.fields.get(name, name)) != name:
            near = (difflib.get_close_matches(mapped, has, 1) or ["..."])[0]
            return (
                f"The rollout batch has no field {mapped!r}, to which fields maps {name!r}. "
                f'It has: {", ".join(has) or "no fields"}. Correct the mapping: fields={{"{name}": "{near}"}}.'
            )
        # What has a meaning of its own is not what is missing under another name.
        free = [key for key in has if key not in FIELDS]
        known = [key for key in ELSEWHERE.get(name, ()) if key in has]
        near = (known or difflib.get_close_matches(name, free, 1, ALIKE) or ["..."])[0]
        return (
            f"The rollout batch has no field {name!r}. It has: {', '.join(has) or 'no fields'}. "
            f'If it carries it under another name, map it: fields={{"{name}": "{near}"}}.'
        )

    def replaced(self, values: Mapping[str, Any]) -> Any:
        """A shallow copy of the source with these fields; the source itself stays as it is."""
        return copy_with(self.source, {self.fields.get(name, name): value for name, value in values.items()})

    def original(self, name: str) -> Any:
        """The field as it was before any decision on this batch, None where there is none."""
        found = self._found(ORIGINAL + name) or self._found(name)
        return None if found is None else found[0][found[1]]


def check_batch(source: Any, where: str = "") -> None:
    """Raise a TypeError for what can hold no fields.

    Args:
        source: What should be a rollout batch.
        where: Where it comes from, as the rest of a sentence.

    Example:
        >>> check_batch([], "rollout of Policy has returned it")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: A rollout batch cannot be a list: rollout of Policy has returned it. Give ...
    """
    if not is_batch(source):
        raise TypeError(
            f"A rollout batch cannot be a {type(source).__name__}{f': {where}' if where else ''}. "
            "Give a dict, a TensorDict, a dataclass or a NamedTuple."
        )


class FieldView(Mapping[str, Any]):
    """The fields of a batch, each read through a function of its name."""

    def __init__(self, batch: Fields, read: Callable[[str], Any]) -> None:
        self._batch, self._read = batch, read

    def __getitem__(self, name: str) -> Any:
        return self._read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._batch[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._batch

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.keys())

    def __len__(self) -> int:
        return len(self._batch.keys())


def is_per_sample(value: Any) -> bool:
    """Whether a field has an entry for each sample, and is no setting of the whole batch."""
    return isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0)
