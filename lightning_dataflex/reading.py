"""Whether a training step reads the weights that it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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
    """Watches the weights of the first training step that has any, and warns if nothing was done with them.

    Args:
        name: Of the callback whose decision they hold.
        key: The field that they are in.
    """

    def __init__(self, name: str, key: str) -> None:
        self.name, self.key = name, key
        self._given: list[Watched] = []
        self._is_over = False

    def watched(self, weights: Any) -> Any:
        """The weights, such that it shows whether they are read."""
        if self._is_over or type(weights) is not Tensor:
            return weights
        if not self._given:
            # Not with the package: to import it takes seconds.
            from torch._dynamo import on_compile_start

            on_compile_start(self._let_go)
        self._given.append(weights.as_subclass(Watched))
        return self._given[-1]

    def watched_in(self, batch: Any, fields: Mapping[str, str]) -> Any:
        """A batch with its weights watched."""
        if self._is_over:
            return batch
        rollout = RolloutBatch.of(batch, fields)
        return rollout.replaced({self.key: self.watched(rollout[self.key])}) if self.key in rollout else batch

    def end_step(self, *, has_loss: bool = True) -> None:
        """The training step is over: warn of weights that nobody has read.

        Args:
            has_loss: Whether there was anything to read them for; else the next step is watched.
        """
        if not self._given:
            return
        unread = not any(weights.was_read for weights in self._given)
        if unread and has_loss:
            rank_zero_warn(
                f"The weights of {self.name} had no effect: the training step has not read {self.key!r}. Multiply the "
                f"per-token policy losses by batch[{self.key!r}], (samples, response tokens), before their mean.",
                UserWarning,
            )
        self.stop()
        self._is_over = has_loss or not unread

    def stop(self) -> None:
        """Watch no more."""
        from torch._dynamo import callback_handler

        self._given, self._is_over = [], True
        if self._let_go in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._let_go)

    def _let_go(self, *_: Any) -> None:
        # AOTAutograd takes no tensors of a class that it does not know, and what compiled code reads does not show.
        for weights in self._given:
            weights.__class__ = Tensor  # type: ignore[assignment]
        self._given, self._is_over = [], True
