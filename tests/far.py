"""Tensors that say they are on a GPU and lie in main memory: what would make a queue wait, or mix devices, is seen."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# The examples of modules are looked for under another name than tests import them by.
if torch._C._get_privateuse1_backend_name() != "far":
    _setup_privateuseone_for_python_backend("far")
DEVICE = torch.device("far:0")
WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal")
"""Operations whose result, or its size, the host asks for."""


class FarTensor(torch.Tensor):
    """A tensor of main memory under another device's name."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> FarTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, near.size(), strides=near.stride(), dtype=near.dtype, device=DEVICE
        )
        made.inside = near
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of Far")


class Far(TorchDispatchMode):
    """Computes with far tensors, notes in `waits` what the host waits for, and refuses what goes wrong on a GPU.

    That is to mix devices, and to bring something home without waiting for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        target = kwargs.get("device")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        far = [leaf for leaf in given if isinstance(leaf, FarTensor)]
        mixed = any(not isinstance(leaf, FarTensor) and leaf.dim() for leaf in given)
        if far and mixed and name not in ("copy_", "_to_copy", "index", "index_put_"):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found two.")
        if target is not None:
            kwargs["device"] = "cpu"
        result = func(*tree_map(near, args), **tree_map(near, kwargs))
        goes_home = name == "_to_copy" and target is not None and torch.device(target).type == "cpu"
        by_mask = name in ("index", "index_put_") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:])
        )
        if far and goes_home and kwargs.get("non_blocking"):
            raise RuntimeError("What comes from a device is read before it is there: it is not waited for.")
        if far and (goes_home or by_mask or name in WAITING):
            self.waits.append(name)
        leaves = target is not None and torch.device(target).type == "far"
        if (not far and not leaves) or goes_home or name == "_local_scalar_dense":
            return result
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda leaf: FarTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


def near(value: Any) -> Any:
    """The tensor in main memory; anything else as it is."""
    return value.inside if isinstance(value, FarTensor) else value
