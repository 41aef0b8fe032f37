"""How many bytes of tensors live at a time, and how much work a function does, counted and not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Counts the operations of PyTorch, the numbers that they read and write, and the bytes that live at a time.

    Attributes:
        num_ops: Operations.
        num_numbers: Elements of their arguments and results together.
        num_syncs: Operations that would make a GPU's queue wait: a number, or a size, is asked for.
        most_bytes: The largest sum of all storages that were new, and alive, after an operation.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = self.num_numbers = self.num_syncs = self.most_bytes = 0
        self.waits: list[str] = []
        self._known: dict[int, StorageWeakRef] = {}
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        for tensor in given:
            key = tensor.untyped_storage()._cdata
            if key not in self._new:
                self._known.setdefault(key, StorageWeakRef(tensor.untyped_storage()))
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_ops += 1
        if not func.is_view:
            self.num_numbers += sum(tensor.numel() for tensor in [*given, *made])
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            leaf.dtype == torch.bool for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor)
        )
        if name in self.WAITS or by_mask:
            self.num_syncs += 1
            self.waits.append(name)
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._new[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._new = {key: (ref, size) for key, (ref, size) in self._new.items() if not ref.expired()}
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self._new.values()))
        return result


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that live while a function works, beside what it was given and what it returns."""
    work()
    with Counted() as counted:
        result = work()
    written = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
    kept = sum(size for key, size in written.items() if key in counted._new)
    return counted.most_bytes - kept


def num_calls(work: Callable[[], object]) -> int:
    """How many Python functions are called."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
