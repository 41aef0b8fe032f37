"""What the exchange between ranks costs, beside torchmetrics' default gathering of the same values.

    python benchmarks/ranks.py

Prints, for 2 and 4 gloo processes on this machine, the bytes that a rank sends and the time of a step, in ratios
measured in turn in one run; then what the same would be on 1,024 ranks under the assumptions that it prints.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_dataflex.packing import ends, joined, packed, unpacked_rows
from lightning_dataflex.sync import exchanged

LATENCY, BANDWIDTH = 15e-6, 10e9
"""Of a collective's hop, in seconds, and of a rank's link, in bytes per second, in the extrapolation."""


class Gathered(Metric):
    """One cat state per column, gathered as torchmetrics does."""

    full_state_update = False

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, columns: dict[str, Tensor]) -> None:
        for name in self.names:
            getattr(self, name).append(columns[name])

    def compute(self) -> list[Tensor]:
        return [dim_zero_cat(getattr(self, name)) for name in self.names]


def columns(num_samples: int, rank: int) -> dict[str, Tensor]:
    """What `group_solve_rate` and `gfpo` need of each sample: 16 bytes."""
    draw = torch.Generator().manual_seed(rank)
    return {
        "num_tokens": torch.randint(1, 4096, (num_samples,), dtype=torch.int32, generator=draw),
        "rm_scores": torch.rand(num_samples, generator=draw),
        "uid": torch.randint(2**62, (num_samples,), generator=draw),
    }


def ours(own: dict[str, Tensor], num_samples: int) -> object:
    return exchanged(lambda: (own, num_samples))


def theirs(own: dict[str, Tensor], metric: Gathered) -> object:
    metric.reset()
    metric.update(own)
    return metric.compute()


def seconds(step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def sent(step: Callable[[], object]) -> tuple[int, int]:
    """Collectives of a step, and the bytes that this rank puts into them."""
    calls: list[int] = []
    real = {
        name: getattr(dist, name)
        for name in ("all_gather", "all_gather_single", "all_gather_into_tensor", "barrier")
        if hasattr(dist, name)
    }

    def noted(collective: Callable, *args: object, **kwargs: object) -> object:
        calls.append(sum(a.numel() * a.element_size() for a in args[1:2] if isinstance(a, Tensor)))
        return collective(*args, **kwargs)

    for name, collective in real.items():
        setattr(dist, name, partial(noted, collective))
    step()
    for name, collective in real.items():
        setattr(dist, name, collective)
    return len(calls), sum(calls)


def measure(rank: int, world: int, totals: list[int], repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/{world}", rank=rank, world_size=world)
    for total in totals:
        size = total // world
        own, metric = columns(size, rank), Gathered(["num_tokens", "rm_scores", "uid"])
        steps = [partial(ours, own, size), partial(theirs, own, metric)]
        counts = [sent(step) for step in steps]
        times = [[seconds(step) for step in steps] for _ in range(repeats)]
        our_time, their_time = (statistics.median(column) for column in zip(*times))
        ratio = statistics.median(theirs / ours for ours, theirs in times)
        if rank == 0:
            (our_calls, our_bytes), (their_calls, their_bytes) = counts
            cells = [
                f"{our_calls} / {their_calls}",
                f"{our_bytes / size:.1f} / {their_bytes / size:.1f}",
                f"{1e3 * our_time:.2f} / {1e3 * their_time:.2f}",
                f"{ratio:.1f}",
            ]
            print(f"| {world} | {total:,} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


def wire(total: int, world: int, num_calls: int) -> float:
    """Seconds of ring all-gathers: every rank receives all rows but its own, in world - 1 hops per collective."""
    return num_calls * (world - 1) * LATENCY + 16 * total * (world - 1) / world / BANDWIDTH


def unpacking(total: int, world: int) -> float:
    """Seconds in which one rank makes columns of the blocks of so many ranks, measured here."""
    block = packed(columns(total // world, rank=0), total // world)
    everyone, header_ends = block.repeat(world, 1), [int(ends(block)[0])] * world
    times = []
    for _ in range(5):
        start = time.perf_counter()
        joined(unpacked_rows(everyone, header_ends))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--totals", nargs="+", type=int, default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print("Ours / torchmetrics, of the same three columns; the ratio is the median of that of each turn.\n")
    print("| ranks | samples | collectives | bytes per sample | ms per step | torchmetrics / ours |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for world in args.worlds:
            mp.spawn(measure, (world, args.totals, args.repeats, folder), nprocs=world)
    print(
        f"\n1,024 ranks, in ms, if a hop takes {1e6 * LATENCY:.0f} us, a link carries {BANDWIDTH / 1e9:.0f} GB/s and "
        "an all-gather goes\naround a ring. Unpacking, of as many rows from each rank, is measured here on one core; "
        "torchmetrics' is\ntaken to be free.\n"
    )
    print("| samples | ours: wire | ours: unpacking | torchmetrics: wire |\n|---|---|---|---|")
    for total in args.totals:
        if total >= 1024:
            parts = (wire(total, 1024, 2), unpacking(total, 1024), wire(total, 1024, 9))
            print(f"| {total:,} | {' | '.join(f'{1e3 * part:.1f}' for part in parts)} |")


if __name__ == "__main__":
    main()
