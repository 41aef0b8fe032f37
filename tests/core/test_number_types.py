"""Numbers of every type as tensors, and what are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex.core.numbers import as_numbers, dense, plain_array

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([1, 2], dtype=torch.uint16), torch.int64),
        (torch.tensor([1, 2], dtype=torch.uint32), torch.int64),
        (torch.tensor([1, 2], dtype=torch.uint64), torch.float64),
        (torch.tensor([1, 2], dtype=torch.uint8), torch.uint8),
        (torch.tensor([1, 2], dtype=torch.float8_e4m3fn), torch.float32),
        (torch.tensor([1, 2], dtype=torch.bfloat16), torch.bfloat16),
        (np.array([1, 2], ">f8"), torch.float64),
        (np.array([1, 2], np.longdouble), torch.float64),
        (np.array([1, 2], np.float16), torch.float16),
        (np.array([2, 0, 1])[::-2], torch.int64),
        ([np.array(1.0), np.array(2.0)], torch.float64),
        ([torch.tensor(1), torch.tensor(2)], torch.int64),
        ((1, 2.0), torch.float32),
        (np.array([1, 2], object), torch.int64),
    ],
)
def test_numbers_of_every_type(value: Any, dtype: torch.dtype) -> None:
    got = as_numbers(value, "x")
    assert (got.tolist(), got.dtype) == ([1, 2], dtype)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("12", "it is '12'"),
        (b"12", "it is b'12'"),
        ([[1], [2, 3], [4, 5, 6], [7] * 4], "it has rows of 1 and of 2 and of 3. Give"),
        ([[[1], [2]], [[3], [4, 5]]], "it has rows of 1 and of 2"),
        ([[1, "a"]], "it holds 'a'"),
        ([1, None], "it holds None"),
        (np.array(["a", "b"]), "it holds 'a'"),
        (np.array([1, None]), "it holds None"),
        (np.ma.masked_array([1, 2], [False, True]), r"it holds masked_array|it holds None"),
        (torch.ones(2, dtype=torch.complex64), "it is torch.complex64, not real"),
        (torch.ones(2, device="meta"), "it is on the meta device"),
        ({"a": 1}, "it is {'a': 1}"),
    ],
)
def test_what_are_no_numbers(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^x is not numeric: {why}"):
        as_numbers(value, "x")


def test_rows_lie_one_beside_the_other() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])):
        with pytest.raises(ValueError, match=r"^x is a sparse or nested tensor. Give a dense one"):
            dense(tensor, "x")
    leaf = torch.ones(2, requires_grad=True)
    assert not dense(leaf, "x").requires_grad


def test_arrays_that_pytorch_reads_are_not_copied() -> None:
    good = np.arange(6.0).reshape(2, 3)
    assert plain_array(good) is good
    assert plain_array(good.T) is not None
    assert np.shares_memory(plain_array(good[:, ::2]), good)
    packed = np.zeros(3, dtype=[("a", "i1"), ("b", "f8")])
    packed["b"] = [1, 2, 3]
    fixed = good.copy()
    fixed.flags.writeable = False
    for odd in (
        good[::-1],
        np.array([1, 2, 3], np.int8)[::-1],
        good.astype(">f8"),
        packed["b"],
        fixed,
        good.astype(np.longdouble),
    ):
        got = plain_array(odd)
        assert got.tolist() == odd.tolist()
        assert got.flags.writeable
        assert all(stride > 0 for stride in got.strides)
        assert torch.as_tensor(got).tolist() == odd.tolist()
