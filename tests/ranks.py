"""Real processes over gloo that stay up for many tests, and batches spread over them."""

from __future__ import annotations

import functools
import os
import pickle
import queue
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60
"""After which a task that has not come back counts as a hang."""


class Ranks:
    """`world` processes with a process group; `run` calls a function in each of them.

    Args:
        world: Number of processes.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._tasks = [context.Queue() for _ in range(world)]
        self._results = context.Queue()
        self._processes = [
            context.Process(
                target=_work, args=(rank, world, self._folder.name, self._tasks[rank], self._results), daemon=True
            )
            for rank in range(world)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], each: Sequence[Any]) -> list[Any]:
        """`function(argument)` on each rank; a failure on any rank, or silence, is an AssertionError."""
        for tasks, argument in zip(self._tasks, each, strict=True):
            tasks.put(pickle.dumps((function, argument)))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.world:
            try:
                rank, ok, value = self._results.get(timeout=SECONDS)
            except queue.Empty:
                silent = [rank for rank in range(self.world) if rank not in results | failures]
                self.close()
                raise AssertionError(f"Ranks {silent} hang in {function.__name__}. {failures}") from None
            (results if ok else failures)[rank] = pickle.loads(value) if ok else value
        assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


@functools.cache
def processes(world: int) -> Ranks:
    """Those of this test run; they end with it."""
    return Ranks(world)


def _work(rank: int, world: int, folder: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    while True:
        # Tensors would otherwise travel as shared files, one each.
        function, argument = pickle.loads(tasks.get())
        try:
            results.put((rank, True, pickle.dumps(function(argument))))
        except Exception:
            results.put((rank, False, traceback.format_exc()))


def spread(batch: dict[str, Any], rows_of: Sequence[Sequence[int]], wide: Sequence[str]) -> list[dict[str, Any]]:
    """The given rows for each rank, its `wide` fields (N, L) cut to the longest response among them."""
    return [_cut(taken(batch, rows), wide) for rows in rows_of]


def taken(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """These rows of every field."""
    index = torch.tensor(rows, dtype=torch.int64)
    return {
        name: value[index] if isinstance(value, torch.Tensor) else [value[row] for row in rows]
        for name, value in batch.items()
    }


def _cut(batch: dict[str, Any], wide: Sequence[str]) -> dict[str, Any]:
    longest = max(int(batch["response_mask"].sum(-1).amax()) if len(batch["response_mask"]) else 1, 1)
    return {name: value[:, :longest] if name in wide else value for name, value in batch.items()}
