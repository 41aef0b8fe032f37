"""How a callback gets between advantage and loss, and leaves again."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dataflex.calls import check_passed, with_decision
from lightning_dataflex.core.config import Drop
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.fields import check_batch
from lightning_dataflex.core.rollout import RolloutBatch

Decide = Callable[[RolloutBatch], "Decision | None"]
"""The decision on a rollout batch, or None to leave it as it is."""


class DataFlexPoint(nn.Module):
    """The place in a training step at which the data scheduler acts; without a callback it does nothing.

    In the module's `__init__`, `self.dataflex = DataFlexPoint()`; in `training_step`, once advantages exist,
    `batch = self.dataflex(batch)`. The batch that comes back is a shallow copy with `rollout_is_weights` (N, L) in it.

    Example:
        >>> DataFlexPoint()({"uid": [0]})
        {'uid': [0]}
    """

    def forward(self, batch: Any) -> Any:
        """The batch, with the decision of each callback in it."""
        return batch


class Mount(ABC):
    """One way to get at the rollout batch of a training step.

    Args:
        decide: What to do with it.
        fields: The batch's own field names.
        drop: What becomes of samples that are not kept.
        weights_key: The field that the weights are written to.
    """

    why_missed: str
    """Why a decision may not have been asked for in a training step."""

    finish: Callable[[Any], Any]
    """What is done to a training batch once every callback has put its decision in."""

    watch: Callable[[str, Any], Any]
    """What is done to a field, by its name, that is an argument of a loss."""

    received: Callable[[Any, Mapping[str, str]], RolloutBatch]
    """The reading of a batch."""

    hand_on: Callable[[RolloutBatch, Any], None] | None = None
    """What is told of a reading and the batch that was made of it; None where the batch goes to the module next."""

    def __init__(self, decide: Decide, fields: Mapping[str, str], drop: Drop, weights_key: str) -> None:
        self.decide, self.fields, self.drop, self.weights_key = decide, fields, drop, weights_key
        self.finish = lambda given: given
        self.watch = lambda _name, given: given
        self.received = RolloutBatch.of
        self._restore: list[Callable[[], None]] = []

    def attach(self, module: nn.Module) -> None:
        """Put hooks into the module."""
        self._attach(module)
        forget_compiled_code()

    @abstractmethod
    def _attach(self, module: nn.Module) -> None: ...

    def detach(self) -> None:
        """Leave the module as it was found."""
        while self._restore:
            self._restore.pop()()
        forget_compiled_code()

    def begin(self, batch: Any) -> None:
        """A training step with this batch from the dataloader is about to start."""

    def before_backward(self, module: nn.Module) -> None:
        """A loss of this module is about to be back-propagated."""

    def _updates(self, batch: RolloutBatch, decision: Decision | None) -> Mapping[str, Any]:
        return {} if decision is None else decision.updates(batch, drop=self.drop, weights_key=self.weights_key)

    def _with(self, decision: Decision | None, batch: RolloutBatch) -> Any:
        updates = self._updates(batch, decision)
        return self.finish(batch.replaced(updates) if updates else batch.source)


class PointMount(Mount):
    """Acts on what passes through the module's `DataFlexPoint`."""

    why_missed = "its DataFlexPoint was not called. Call batch = self.dataflex(batch) in every training_step"

    def _attach(self, module: nn.Module) -> None:
        @torch.compiler.disable(recursive=True)
        def hook(point: nn.Module, _args: Any, batch: Any) -> Any:
            check_passed(batch, module, point)
            rollout = self.received(batch, self.fields)
            result = self._with(self.decide(rollout), rollout)
            if self.hand_on is not None:
                self.hand_on(rollout, result)
            return result

        self._restore = [point.register_forward_hook(hook).remove for point in points_of(module)]


class LossMount(Mount):
    """Acts on the batch that the module's loss is called with: a submodule, or a method, by its (dotted) name."""

    why_missed = (
        "the loss was not called through its attribute. Call it in every training_step, as a module or method, "
        "not its forward and not a reference that was taken earlier"
    )

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(*args)
        self.name = name

    def _attach(self, module: nn.Module) -> None:
        owner, attribute = _owner(module, self.name)
        target: Any = getattr(owner, attribute)
        forward = getattr(target, "_orig_mod", target).forward if isinstance(target, nn.Module) else target
        signature = inspect.signature(forward)

        def updates_of(batch: RolloutBatch) -> Mapping[str, Any]:
            return {name: self.watch(name, v) for name, v in self._updates(batch, self.decide(batch)).items()}

        @torch.compiler.disable(recursive=True)
        def arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return with_decision(signature, args, kwargs, self.fields, updates_of)

        if isinstance(target, nn.Module):
            handle = target.register_forward_pre_hook(lambda _module, a, k: arguments(a, k), with_kwargs=True)
            self._restore = [handle.remove]
            return

        @functools.wraps(target)
        def loss(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = arguments(args, kwargs)
            return target(*args, **kwargs)

        self._restore = [replaced_attribute(owner, attribute, loss)]


class BatchMount(Mount):
    """Acts on the batch of the dataloader, which holds rewards and advantages already."""

    why_missed = "training_step was not called with the batch. Call it through the Trainer"

    def begin(self, batch: Any) -> None:
        # Once per batch: a step may be called several times with it, by LBFGS, or with a copy of it, on GPUs.
        check_batch(batch, "the training loader gives it, and mount is on_train_batch_start")
        self._decision = self.decide(RolloutBatch.of(batch, self.fields))

    def _attach(self, module: nn.Module) -> None:
        training_step = module.training_step
        assert callable(training_step)

        @functools.wraps(training_step)  # the Trainer reads its signature
        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            # The batch may come from another callback, whose weights are multiplied.
            return training_step(self._with(self._decision, RolloutBatch.of(batch, self.fields)), *args, **kwargs)

        self._restore = [replaced_attribute(module, "training_step", step)]


class GradientMount(Mount):
    """Scales the gradient of the per-token policy losses that the module publishes as `pg_losses`."""

    why_missed = (
        "pg_losses was not published anew. Set self.pg_losses to the per-token policy losses in every training_step, "
        "and back-propagate with manual_backward under manual optimisation"
    )
    _batch: Any = None
    _seen: Callable[[], Tensor | None] = staticmethod(lambda: None)

    def _attach(self, module: nn.Module) -> None:
        pass

    def begin(self, batch: Any) -> None:
        self._batch = batch

    def before_backward(self, module: nn.Module) -> None:
        losses = getattr(module, "pg_losses", None)
        if not isinstance(losses, Tensor) or losses is self._seen():
            return
        self._seen = weakref.ref(losses)
        batch = getattr(module, "rollout_batch", self._batch)
        check_batch(batch, f"{type(module).__name__} has it as rollout_batch, or the training loader gives it")
        decision = self.decide(RolloutBatch.of(batch, self.fields))
        if decision is not None:
            _scale_gradient(losses, decision.weights)


def mount_of(module: nn.Module, name: str | None) -> Callable[..., Mount]:
    """The kind of mount to use: what was asked for, or the best that the module offers.

    Raises:
        ValueError: The module does not have what was asked for, or offers none.
    """
    if name is None:
        name = "point" if points_of(module) else "policy_loss"
    if not isinstance(name, str):
        raise ValueError(f"mount is {name!r}. Give point, on_train_batch_start, on_before_backward or a name, as text.")
    if name == "on_train_batch_start":
        return BatchMount
    if name == "on_before_backward":
        return GradientMount
    kind = type(module).__name__
    if name == "point":
        if points_of(module):
            return PointMount
        raise ValueError(
            f"mount is 'point' but {kind} has no DataFlexPoint. Write self.dataflex = DataFlexPoint() in its __init__ "
            "and batch = self.dataflex(batch) after the advantages."
        )
    owner, attribute = _owner(module, name)
    if callable(_attribute(owner, attribute)):
        return functools.partial(LossMount, name)
    instead = (
        "Leave mount out to use its DataFlexPoint, or give"
        if points_of(module)
        else "It has no DataFlexPoint either: add self.dataflex = DataFlexPoint(), or give as mount"
    )
    raise ValueError(
        f"{kind} has no module or method {name!r}. {instead} the name of the attribute that computes its policy loss, "
        "on_train_batch_start or on_before_backward."
    )


def points_of(module: nn.Module) -> list[DataFlexPoint]:
    """The points of a module."""
    return [child for child in module.modules() if isinstance(child, DataFlexPoint)]


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """The object that holds the last part of a dotted name; None where the path leads nowhere."""
    *path, attribute = name.split(".")
    owner: Any = module
    for part in path:
        owner = _attribute(owner, part)
    return owner, attribute


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, None where there is none; a ValueError for a property that cannot be read."""
    try:
        return getattr(owner, name, None)
    except Exception as error:
        raise ValueError(
            f"mount names {name!r} of {type(owner).__name__}, which cannot be read: {str(error).rstrip('.')}. Name the "
            "module or method that computes the policy loss."
        ) from error


def replaced_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on the instance, past `nn.Module.__setattr__`; the returned function restores it."""
    own = owner.__dict__
    restore = (
        functools.partial(own.__setitem__, name, own[name]) if name in own else functools.partial(own.pop, name, None)
    )
    own[name] = value
    return restore


def _scale_gradient(losses: Tensor, weights: Tensor) -> None:
    """Multiply the gradient that reaches per-token losses (N, L) by weights (N, L)."""
    if losses.shape != weights.shape:
        raise ValueError(
            f"pg_losses has shape {tuple(losses.shape)} but the batch has weights of {tuple(weights.shape)}. "
            "Publish one loss per response token, and as rollout_batch the batch that they belong to."
        )
    if not losses.requires_grad:
        raise ValueError("pg_losses has no gradient. Publish the tensor that the loss is computed from.")

    def scaled(gradient: Tensor | None) -> Tensor:
        if gradient is None:
            raise RuntimeError(
                "No gradient reached pg_losses: the loss does not pass through it, or was compiled in one graph with "
                "it. Leave the loss uncompiled, or use a DataFlexPoint."
            )
        return torch.where(weights == 0, 0.0, gradient * weights).to(gradient.dtype)

    losses.register_hook(scaled)


def forget_compiled_code() -> None:
    """Let compiled modules be traced anew."""
    # Compiled code does not look for hooks that were added or removed after it was traced.
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
