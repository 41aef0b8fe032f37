"""How many bytes of tensors live at a time, and how much work a function does, counted and not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dataflex.functional.storage import places_in_use


class Counted(TorchDispatchMode):
    """Counts the numbers that the operations of PyTorch read and write, and the bytes that live at a time.

    Attributes:
        num_numbers: Elements of arguments and results together.
        most_bytes: The largest sum of all storages that were new, and alive, after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_numbers = self.most_bytes = 0
        self._known: dict[int, StorageWeakRef] = {}
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> Any:
        self._places_before = places_in_use()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata in self._new or storage._cdata in self._known:
                continue
            # What PyTorch has not allocated is seen when it is read.
            if storage.data_ptr() in places_in_use() - self._places_before:
                self._new[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            else:
                self._known[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not func.is_view:
            self.num_numbers += sum(tensor.numel() for tensor in [*given, *made])
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
