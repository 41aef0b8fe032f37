"""Memory that is used again: never while anybody reads it, and no more than a step needs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import storage
from lightning_dataflex.functional.storage import empty

SHAPE = (64, 64)


@pytest.fixture(autouse=True)
def from_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is kept from 1 KiB on, and nothing is kept from other tests."""
    monkeypatch.setattr(storage, "LARGE", 2**10)
    monkeypatch.setattr(storage._kept, "pieces", [])


def pieces() -> list[int]:
    return [len(piece.memory) for piece in storage._kept.pieces]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("large", [1, 10**9])
def test_room_for_values_to_come(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, large: int) -> None:
    monkeypatch.setattr(storage, "LARGE", large)
    room = empty((3, 5), dtype)
    assert (room.shape, room.dtype, room.is_contiguous()) == ((3, 5), dtype, True)
    room.fill_(1)
    assert np.asarray(room.float()).sum() == 15
    assert empty((0, 5), dtype).shape == (0, 5)
    # What is saved or sent is the tensor, not the block that it lies in.
    assert room.untyped_storage().nbytes() == 15 * dtype.itemsize


def test_memory_is_used_again_once_nobody_reads_it() -> None:
    first = empty(SHAPE, torch.float32)
    place = first.data_ptr()
    assert place % storage.ALIGNMENT == 0
    del first
    assert empty(SHAPE, torch.int32).data_ptr() == place
    assert len(pieces()) == 1


@pytest.mark.parametrize(
    "held",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[3:, 1],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
        lambda tensor: (tensor * torch.ones((), requires_grad=True)).grad_fn,
    ],
    ids=["itself", "view", "array", "storage", "dlpack", "graph"],
)
def test_memory_that_somebody_reads_is_left_alone(held) -> None:
    tensor = empty(SHAPE, torch.float32).fill_(7)
    place, kept = tensor.data_ptr(), held(tensor)
    del tensor
    others = [empty(SHAPE, torch.float32).fill_(0) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    del kept
    assert empty(SHAPE, torch.float32).data_ptr() == place


def test_a_batch_that_is_a_little_longer_finds_what_is_there_and_a_short_one_takes_no_long_block() -> None:
    place = empty((1000,), torch.float32).data_ptr()
    assert empty((1010,), torch.float32).data_ptr() == place
    assert empty((600,), torch.float32).data_ptr() == place
    assert empty((400,), torch.float32).data_ptr() != place
    assert pieces() == [4096, 1792]


def test_of_free_blocks_the_smallest_is_used_and_the_oldest_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MOST_KEPT", 2)
    small, large = empty((1024,), torch.float32), empty((1536,), torch.float32)
    place = small.data_ptr()
    del small, large
    assert empty((1000,), torch.float32).data_ptr() == place
    empty((10_000,), torch.float32)
    assert pieces() == [6144, 40960]


def test_what_was_in_use_at_one_time_is_given_back_though_a_step_needs_no_other_size(monkeypatch) -> None:
    monkeypatch.setattr(storage, "MOST_KEPT", 2)
    many = [empty(SHAPE, torch.float32) for _ in range(5)]
    assert len(pieces()) == 5
    del many
    tensor = empty(SHAPE, torch.float32)
    assert len(pieces()) == 2
    assert tensor.data_ptr() in storage.places_in_use()


def test_each_thread_has_memory_of_its_own() -> None:
    place, seen = empty(SHAPE, torch.float32).data_ptr(), []
    thread = threading.Thread(target=lambda: seen.append(empty(SHAPE, torch.float32).data_ptr()))
    thread.start()
    thread.join()
    assert len(seen) == 1
    assert len(pieces()) == 1
    assert empty(SHAPE, torch.float32).data_ptr() == place
