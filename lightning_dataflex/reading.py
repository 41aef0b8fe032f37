"""Whether a training step reads the decision that it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import rank_zero_warn

from lightning_dataflex.core.rollout import RolloutBatch

_LOOKS = {getattr(Tensor, name).__get__ for name in ("device", "dtype", "layout", "ndim", "requires_grad", "shape")}
"""What may be asked of a tensor without reading its numbers."""


class Watched(Tensor):
    """A tensor that notes when something is computed from it; what is computed is a plain tensor.

    Example:
        >>> weights = torch.ones(2, 3).as_subclass(Watched)
        >>> weights.shape, weights.was_read
        (torch.Size([2, 3]), False)
        >>> type(weights * 2), weights.was_read
        (<class 'torch.Tensor'>, True)
    """

    was_read = False

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKS:
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(each, Watched):
                        each.was_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self.was_read = True
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.was_read = True
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class FirstReading:
    """Watches fields of batches with a decision until a step has trained, and warns if nothing was done with them.

    Args:
        keys: The fields that show whether the decision is read, by this project's names; one of them is enough.
        message: What to warn of.
    """

    def __init__(self, keys: Collection[str], message: str) -> None:
        self.keys, self.message = keys, message
        self._given: list[Watched] = []
        self._is_over = False

    @classmethod
    def of_weights(cls, name: str, key: str) -> FirstReading:
        """That of a callback whose decision is in the weights alone."""
        return cls(
            [key],
            f"The weights of {name} had no effect: the training step has not read {key!r}. Multiply the "
            f"per-token policy losses by batch[{key!r}], (samples, response tokens), before their mean.",
        )

    @classmethod
    def of_selection(cls, name: str, keys: Sequence[str]) -> FirstReading:
        """That of a callback whose decision is in each of several fields, such as the mask and the weights."""
        *others, last = map(repr, keys)
        return cls(
            keys,
            f"The selection of {name} had no effect: the training step has read neither {', '.join(others)} nor {last} "
            "of the batch with the decision. Compute the loss from that batch: batch = self.dataflex(batch), with a "
            "DataFlexPoint.",
        )

    def watched(self, key: str, value: Any) -> Any:
        """The value of a field, such that it shows whether it is read."""
        if self._is_over or key not in self.keys or type(value) is not Tensor:
            return value
        if not self._given:
            # Not with the package: to import it takes seconds.
            from torch._dynamo import on_compile_start

            on_compile_start(self._let_go)
        self._given.append(value.as_subclass(Watched))
        return self._given[-1]

    def watched_in(self, batch: Any, fields: Mapping[str, str]) -> Any:
        """A batch with its fields watched."""
        rollout = RolloutBatch.of(batch, fields)
        there = {key: rollout[key] for key in self.keys if key in rollout}
        # A list, or a tensor of a class of its own, does not show whether it is read.
        if self._is_over or not all(type(value) is Tensor for value in there.values()):
            return batch
        return rollout.replaced({key: self.watched(key, value) for key, value in there.items()})

    def end_step(self, *, has_trained: bool = True) -> None:
        """The training step is over: warn of a decision that nobody has read.

        Args:
            has_trained: Whether anything was trained on in it; else what it was given may be read in a later one.
        """
        if not self._given:
            return
        unread = not any(value.was_read for value in self._given)
        if unread and not has_trained:
            return
        if unread:
            rank_zero_warn(self.message, UserWarning)
        self.stop()

    def stop(self) -> None:
        """Watch no more."""
        from torch._dynamo import callback_handler

        self._given, self._is_over = [], True
        if self._let_go in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._let_go)

    def _let_go(self, *_: Any) -> None:
        # AOTAutograd takes no tensors of a class that it does not know, and what compiled code reads does not show.
        for value in self._given:
            value.__class__ = Tensor  # type: ignore[assignment]
        self._given, self._is_over = [], True
