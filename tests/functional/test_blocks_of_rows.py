"""Functions of rows in blocks: the same as of the whole table, whatever the block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import blocks
from lightning_dataflex.functional.blocks import by_rows, empty


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


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("huge", [1, 10**9])
def test_room_for_values_to_come(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, huge: int) -> None:
    monkeypatch.setattr(blocks, "HUGE", huge)
    room = empty((3, 5), dtype)
    assert (room.shape, room.dtype, room.is_contiguous()) == ((3, 5), dtype, True)
    room.fill_(1)
    assert np.asarray(room.float()).sum() == 15
    assert empty((0, 5), dtype).shape == (0, 5)
