"""Functions of rows in blocks: the same as of the whole table, whatever the block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import blocks
from lightning_dataflex.functional.blocks import blank_padding, by_rows, masked, whole_slices
from lightning_dataflex.functional.tokens import any_nan, flat_values, mask_read


def summed(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, 0.0).sum(-1)


@pytest.mark.parametrize(
    ("block", "num_rows", "calls"),
    [(12, 4, [4]), (11, 4, [3, 1]), (6, 4, [2, 2]), (3, 4, [1] * 4), (1, 4, [1] * 4), (11, 0, [0]), (13, 5, [4, 1])],
)
def test_a_table_is_read_a_block_at_a_time(
    monkeypatch: pytest.MonkeyPatch, block: int, num_rows: int, calls: list[int]
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    values = torch.arange(3.0 * num_rows).view(num_rows, 3)
    mask, seen = values % 2 == 0, []

    def function(rows: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return summed(rows, inside)

    assert by_rows(function, values, mask).tolist() == summed(values, mask).tolist()
    assert seen == calls


def test_results_have_the_shape_and_type_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 4)
    table = torch.arange(12.0).view(6, 2)
    pairs = by_rows(lambda rows: torch.stack([rows, rows + 1], -1).half(), table)
    assert (pairs.shape, pairs.dtype) == ((6, 2, 2), torch.float16)
    assert pairs[..., 1].tolist() == (table + 1).tolist()
    # The widest table says how many rows go at a time.
    assert by_rows(lambda flat, rows: flat + rows.sum(1), torch.ones(6), table).tolist() == (1 + table.sum(1)).tolist()


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex128]
MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, True], [False, False, False]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [(True, True), (True, False), (False, True)], ids=["both", "values", "mask"])
@pytest.mark.parametrize("block", [2**18, 4])
def test_what_is_masked_is_what_where_gives(
    monkeypatch, dtype: torch.dtype, wide: tuple[bool, bool], block: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    numbers = [1.5, -0.0, 3.0, np.nan, np.inf, -np.inf, 0.1, -7.0, 0.0, 2.0, 100.0, np.nan]
    values = torch.tensor(numbers if dtype.is_floating_point else range(12)).view(4, 3).to(dtype)
    values, mask = values if wide[0] else values[:, :1], MASK if wide[1] else MASK[:, 1:2]
    before = values.clone()

    expected = torch.where(mask, values, torch.zeros((), dtype=dtype))

    for got in (masked(values, mask), blank_padding(values, mask), masked(values.T, mask.T).T):
        assert got.dtype == dtype
        # To the bit: 0 and -0 are not the same, and NaN is.
        assert np.array_equal(bits(got), bits(expected))
    assert np.array_equal(bits(values), bits(before))


def bits(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("block", [2**18, 4])
def test_what_is_turned_around_when_it_is_read_is_masked_as_it_reads(monkeypatch, block: int) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    numbers = torch.complex(torch.arange(12.0), torch.arange(12.0)).view(4, 3)
    for values in (numbers.conj(), numbers.conj().imag):
        expected = torch.where(MASK, values, torch.zeros((), dtype=values.dtype))
        assert masked(values, MASK).tolist() == blank_padding(values, MASK).tolist() == expected.tolist()


def test_what_has_a_gradient_keeps_it() -> None:
    values = torch.tensor([[1.0, torch.nan]], requires_grad=True)
    for function in (masked, blank_padding):
        (gradient,) = torch.autograd.grad(function(values, torch.tensor([[True, False]])).sum(), values)
        assert gradient.tolist() == [[1, 0]]


def test_a_table_of_no_samples_or_tokens_stays_one() -> None:
    for shape in ((0, 3), (2, 0)):
        assert blank_padding(torch.ones(shape), torch.ones(shape, dtype=torch.bool)).shape == shape
    assert blank_padding(torch.ones(2, 1), torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0)


@pytest.mark.parametrize("block", [2**18, 4])
@pytest.mark.parametrize(
    ("mask", "lengths", "lowest"),
    [
        (torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]), [2, 0, 3], 0),
        (torch.tensor([[1, 1], [1, 1]], dtype=torch.uint8), [2, 2], 1),
        (torch.tensor([[2, 0], [1, 0], [5, 7]]), [1, 1, 2], 0),
        (torch.tensor([[1, -1], [1, 0]]), None, -1),
        (torch.tensor([[0.5, 0.0], [1.0, 1.0]]), [1, 2], 0),
        (torch.tensor([[0.5, np.nan]]), None, np.nan),
    ],
)
def test_a_mask_is_read_with_its_lengths_and_its_least_number(monkeypatch, block: int, mask, lengths, lowest) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    valid, got, least = mask_read(mask)
    assert torch.equal(valid, mask != 0)
    assert lengths is None or got.tolist() == lengths
    assert got.dtype == torch.int64
    assert np.array_equal(least.item(), lowest, equal_nan=True)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([2, 1, 3, 1], [(0, 3), (3, 6), (6, 7)]),
        ([7], [(0, 7)]),
        ([1, 1, 1], [(0, 3)]),
        ([], []),
        ([0, 3, 0], [(0, 3)]),
    ],
)
def test_what_belongs_together_is_in_one_slice(monkeypatch, sizes, expected) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 6)
    assert list(whole_slices(sizes, 2)) == [slice(*ends) for ends in expected]


TABLE = torch.tensor([[np.nan, 1.0], [np.inf, -np.inf], [2.0, np.nan], [3e38, 3e38], [-3e38, -np.inf]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [2**18, 4])
def test_nan_among_valid_tokens_is_found_and_nothing_else(monkeypatch, dtype: torch.dtype, block: int) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    mask = torch.tensor([[True, True], [True, True], [True, False], [True, True], [True, True]])
    assert any_nan(TABLE.to(dtype)).tolist() == [True, False, True, False, False]
    assert any_nan(TABLE.to(dtype), mask).tolist() == [True, False, False, False, False]
    assert any_nan(torch.stack([TABLE, TABLE], -1).to(dtype)).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_nan_of_one_byte_is_found(dtype: torch.dtype) -> None:
    table = torch.tensor([[np.nan, 1.0], [1.0, np.nan]]).to(dtype)
    assert any_nan(table).tolist() == [True, True]
    assert any_nan(table, torch.tensor([[True, True], [True, False]])).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float64], ids=str)
def test_flat_values_are_a_copy_row_by_row(dtype: torch.dtype) -> None:
    values = torch.arange(12).view(4, 3).to(dtype)
    flat = flat_values(values, MASK)
    assert (flat.tolist(), flat.dtype) == ([0, 2, 5, 6, 7, 8], dtype)
    flat.zero_()
    assert values.flatten().tolist() == list(range(12))
