"""Time and memory of a decision from a thousand samples to four million, and of mixtures up to ten thousand domains.

    python benchmarks/scale.py

A straight line is a growth of 1: the exponent of the time over the size. Then the share of one rank of 1,024: each
rank's part is packed as it would be sent, and one rank unpacks them all and decides, without a network.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning_dataflex as df
from benchmarks import batches
from benchmarks.memory import peak_bytes
from lightning_dataflex import sync
from lightning_dataflex.packing import ends

SAMPLES = [2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22]
DOMAINS = [10, 100, 1_000, 10_000]
RANKS = 1024
RULES: dict[str, dict[str, Any]] = {
    "threshold_band": {
        "mechanism": "select",
        "scorer": "group_solve_rate",
        "actuator": {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}},
    },
    "gfpo": {"mechanism": "select", "actuator": {"name": "gfpo", "params": {"k": 2}}},
    "max_variance": {"mechanism": "select", "actuator": "max_variance"},
    "variance_top_p": {"mechanism": "select", "actuator": "variance_top_p"},
    "softmax": {"mechanism": "reweight", "scorer": "group_std", "actuator": "softmax"},
}


def rollout(num_samples: int, num_domains: int = 3, start: int = 0) -> dict[str, Any]:
    """Four samples of four tokens to each prompt, whose ids are texts of 36 characters."""
    draw, groups = np.random.default_rng(start), max(1, num_samples // 4)
    return {
        "response_mask": torch.ones(num_samples, 4, dtype=torch.int64),
        "rm_scores": torch.from_numpy(draw.integers(0, 2, num_samples)).float(),
        "uid": [f"{start + i:036d}" for i in range(groups) for _ in range(4)],
        "domain": torch.from_numpy(draw.integers(0, num_domains, num_samples)),
    }


def seconds(work: Any, rounds: int) -> list[float]:
    work()
    return [batches.milliseconds(work) / 1e3 for _ in range(rounds)]


def by_samples(most: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Of each rule the milliseconds, and the bytes per sample, at each number of samples."""
    sizes = [size for size in SAMPLES if size <= most]
    found = {name: {"name": name, "sizes": sizes, "ms": [], "bytes": []} for name in RULES}
    for size in sizes:
        batch = rollout(size)
        for name, block in RULES.items():
            pipeline = df.Pipeline.from_config(block, adv_estimator="grpo")
            work = partial(pipeline.decide, batch)
            found[name]["ms"].append(1e3 * batches.median(seconds(work, rounds)))
            found[name]["bytes"].append(peak_bytes(work) / size)
    yield from found.values()


def by_domains(rounds: int) -> Iterator[dict[str, Any]]:
    """Of each mixer the milliseconds of a step with 16,384 samples at each number of domains."""
    for name, cls in df.components("mixer").items():
        times = []
        for num in DOMAINS:
            names = [str(i) for i in range(num)]
            params: dict[str, Any] = {"floor": 0.0} if "floor" in inspect.signature(cls).parameters else {}
            if name == "adarft":
                params["difficulty"] = {each: float(each) for each in names}
            actuator = {"name": name, "params": params}
            mixture = df.Mixture.from_config({"mechanism": "mix", "actuator": actuator, "domains": names})
            batch = rollout(2**14, num)
            batch["domain"] = [names[i] for i in batch["domain"].tolist()]
            steps = iter(range(10**9))

            def work(mixture: Any = mixture, batch: Any = batch, steps: Any = steps) -> None:
                step = next(steps)
                mixture.observe(batch | {"advantages": batch["rm_scores"]}, step)
                mixture.end_step(step, progress=0.5)

            times.append(1e3 * batches.median(seconds(work, rounds)))
        yield {"name": name, "sizes": DOMAINS, "ms": times}


class Payloads:
    """The parts of all ranks, recorded from one after the other, then given to each as if it had gathered them."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.recording = True

    def all_gather(self, row: Tensor, group: Any, what: str) -> Tensor:
        if row.dtype == torch.int64:  # the sizes, which all ranks have alike here
            return row.repeat(RANKS, 1)
        if self.recording:
            self.blocks.append(row[0])
            raise StopIteration
        return torch.stack(self.blocks)

    def __enter__(self) -> Payloads:
        self._patches = [
            mock.patch.object(sync, "_all_gather", self.all_gather),
            mock.patch.object(sync, "num_ranks", return_value=RANKS),
            mock.patch("lightning_dataflex.core.global_batch.num_ranks", return_value=RANKS),
            mock.patch.object(sync.dist, "get_rank", return_value=0),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *args: object) -> None:
        for patch in self._patches:
            patch.stop()


def one_of_many(total: int, rounds: int) -> Iterator[dict[str, Any]]:
    """What a rank of 1,024 does for a decision on so many samples, but for waiting for the network."""
    size = total // RANKS
    local = [rollout(size, start=rank * size) for rank in range(RANKS)]
    for name, block in RULES.items():
        pipeline = df.Pipeline.from_config(block, adv_estimator="grpo")
        with Payloads() as payloads:
            for batch in local:
                try:
                    pipeline.decide(batch)
                except (StopIteration, RuntimeError):
                    continue
            payloads.recording = False
            times = seconds(partial(pipeline.decide, local[0]), rounds)
        alone = df.Pipeline.from_config(block, adv_estimator="grpo")
        whole = seconds(partial(alone.decide, rollout(total)), rounds)
        sent = int(ends(payloads.blocks[0])[1])
        yield {"name": name, "ms": 1e3 * batches.median(times), "alone": 1e3 * batches.median(whole), "sent": sent}


def table(rows: list[dict[str, Any]], unit: str) -> str:
    """Markdown."""
    sizes = rows[0]["sizes"]
    lines = [f"| rule | {' | '.join(f'{size:,} {unit}' for size in sizes)} | growth from {sizes[-4]:,} |"]
    lines.append(f"|---|{'--:|' * (len(sizes) + 1)}")
    for row in rows:
        cells = [f"{ms:.3g}" for ms in row["ms"]]
        if "bytes" in row:
            cells = [f"{ms} ({size:.0f})" for ms, size in zip(cells, row["bytes"])]
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {batches.exponent(sizes[-4:], row['ms'][-4:]):.2f} |")
    return "\n".join(lines)


def table_of_ranks(total: int, rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [f"| rule, {total:,} samples | ms on one rank of {RANKS:,} | ms of one process with all | bytes sent |"]
    lines.append("|---|--:|--:|--:|")
    lines += [f"| {row['name']} | {row['ms']:.0f} | {row['alone']:.0f} | {row['sent']:,} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=SAMPLES[-1], help="samples")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    print(f"{batches.machine()}\n\nMilliseconds (most bytes of tensors per sample at a time).\n")
    print(table(list(by_samples(args.most, args.rounds)), "samples"), end="\n\n")
    print(table(list(by_domains(args.rounds)), "domains"), end="\n\n")
    for total in (2**17, 2**20):
        print(table_of_ranks(total, list(one_of_many(total, args.rounds))), end="\n\n")
    print(f"{time.perf_counter() - begin:.0f} s in all.")


if __name__ == "__main__":
    main()
