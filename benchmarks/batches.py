"""Rollout batches of a given size for the benchmarks, and the time of reading one."""

from __future__ import annotations

import platform
import statistics
import time
import uuid
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

DOMAINS = ("code", "logic", "math")
PER_TOKEN = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs")


def rollout(groups: int, size: int, tokens: int, *, num_domains: int = 3, device: str = "cpu") -> dict[str, Any]:
    """A batch as verl gives it: masks of integers, a reward at the last token, UUIDs as texts of 36 characters."""
    draw, num = np.random.default_rng(0), groups * size
    lengths = torch.from_numpy(draw.integers(1, tokens + 1, num))
    mask = torch.arange(tokens) < lengths[:, None]
    solved = draw.random(num) < draw.random(groups).repeat(size)
    rewards = torch.zeros(num, tokens)
    rewards[torch.arange(num), lengths - 1] = torch.from_numpy(solved).float()
    normal = torch.Generator().manual_seed(0)

    def table() -> Tensor:
        return torch.where(mask, torch.rand(num, tokens, generator=normal), 0.0)

    names = DOMAINS if num_domains == 3 else [f"domain {i}" for i in range(num_domains)]
    uids = [str(uuid.UUID(bytes=draw.bytes(16))) for _ in range(groups)]
    batch: dict[str, Any] = {
        "response_mask": mask.long(),
        "rm_scores": rewards,
        "advantages": torch.where(mask, torch.randn(num, 1, generator=normal), 0.0),
        "entropies": table(),
        **{name: -table() for name in PER_TOKEN},
        **{name: torch.from_numpy(draw.random(num)).float() for name in ("difficulty", "limr_score")},
        "rollout_step": torch.zeros(num),
    }
    batch = {name: value.to(device) for name, value in batch.items()}
    return batch | {
        "uid": np.array(uids, dtype=object).repeat(size),
        "domain": [names[i % num_domains] for i in range(groups) for _ in range(size)],
    }


def read_once(batch: dict[str, Any], names: Iterable[str]) -> None:
    """The floor: each of these fields is read once."""
    for name in names:
        value = batch["uid" if name == "prompt_id" else name]
        if isinstance(value, Tensor):
            value.sum()
        else:
            sum(map(len, value))  # texts


def milliseconds(work: Callable[[], object], device: str = "cpu") -> float:
    """The time of some work; of work that has timed itself what it returns."""
    start = time.perf_counter()
    made = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return made if isinstance(made, float) else 1e3 * (time.perf_counter() - start)


def in_turn(works: dict[str, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Milliseconds of each piece of work in each round, after one that does not count; all have the same neighbours."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 1):
        for name, work in works.items():
            seen = milliseconds(work, device)
            if i:
                times[name].append(seen)
    return times


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:.3g}..{high:.3g}"


def exponent(sizes: list[int], times: list[float]) -> float:
    """The slope of the logarithm of time over that of size: 1 is a straight line."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def machine() -> str:
    """What the figures were measured on."""
    names = ("torch", "lightning", "torchmetrics", "numpy")
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{[*models, platform.machine()][0]}, {torch.get_num_threads()} thread, {accelerator}; {platform.system()}, "
        f"Python {platform.python_version()}, {versions}"
    )
