"""What became of the samples of a run, step by step, from its decision trace."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_dataflex.core.summary import SOLVED
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.report.metrics import MOST
from lightning_dataflex.trace_files import JsonPart, ParquetPart

NEEDED = ("step", "kept", "reason", "length")
"""Columns without which a table is no trace."""
READ = (*NEEDED, "uid", "reward", "label")
MOST_RATES, NUM_RATES = 17, 11
"""Solve rates that groups of one size can have, if they are shown each; else how many stand for all."""


@dataclass
class StepOfTrace:
    """The samples of one step."""

    tokens: int = 0
    tokens_trained: int = 0
    reasons: Counter = field(default_factory=Counter)
    outcomes: dict[str, list[bool]] = field(default_factory=dict)
    """By group, of samples with a reward."""
    rewards: list[float] = field(default_factory=lambda: [0.0, 0])
    rewards_kept: list[float] = field(default_factory=lambda: [0.0, 0])
    """Sum and number, of the samples with a reward, and of the kept ones."""

    def mean_reward(self, name: str) -> float | None:
        """`reward_all` or `reward_kept`, None where no sample has a reward."""
        total, num = self.rewards_kept if name == "reward_kept" else self.rewards
        return total / num if num else None


Trace = dict[str, dict[int, StepOfTrace]]
"""By callback and step."""


def trace_of(path: Path) -> Trace:
    """A trace by step; a last line that is not yet written whole is left out.

    Raises:
        ValueError: It is none, or is in Parquet and pyarrow is not installed.
    """
    found: Trace = {}
    for row, where in _rows(path):
        try:
            label = str(row.get("label") or "")
            if not (0 <= row["step"] < MOST and 0 <= row["length"] < MOST):
                raise ValueError("no number of steps or tokens")
            step = found.setdefault(label, {}).setdefault(int(row["step"]), StepOfTrace())
            step.tokens += int(row["length"])
            step.tokens_trained += int(row["length"]) if row["kept"] else 0
            step.reasons[str(row["reason"])] += 1
            reward = row.get("reward")
            if reward is None or not math.isfinite(reward):
                continue
            for each in (step.rewards, step.rewards_kept) if row["kept"] else (step.rewards,):
                each[0] += reward
                each[1] += 1
            if row.get("uid") is not None:
                step.outcomes.setdefault(str(row["uid"]), []).append(reward > SOLVED)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where} is no row of a trace: {shown(row)}. Give another folder or --trace.") from error
    return {label: dict(sorted(steps.items())) for label, steps in found.items()}


def rates_of(steps: Iterable[StepOfTrace]) -> tuple[list[float], list[list[int]]]:
    """Solve rates from 0 to 1, and of each step how many groups are nearest to each of them.

    They are those that a group can have where all have one size, so that none stands empty for no reason.

    Example:
        >>> rates_of([StepOfTrace(outcomes={"a": [True, False], "b": [True, True]})])
        ([0.0, 0.5, 1.0], [[0, 1, 1]])
    """
    groups = [list(step.outcomes.values()) for step in steps]
    sizes = {len(solved) for step in groups for solved in step}
    largest = max(sizes, default=0)
    num = largest + 1 if len(sizes) == 1 and 1 < largest < MOST_RATES else NUM_RATES
    counts = [[0] * num for _ in groups]
    for row, step in zip(counts, groups):
        for solved in step:
            row[int(sum(solved) / len(solved) * (num - 1) + 0.5)] += 1
    return [i / (num - 1) for i in range(num)], counts


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder: files by their columns, that of rank 0 alone; folders by the names in them."""
    files = [each for each in sorted(folder.glob("*.jsonl")) if not re.search(JsonPart.OTHERS + "$", each.name)]
    folders = [each for each in sorted(folder.glob("*.parquet")) if ParquetPart(each).ranks()]
    return [each for each in files if each.is_file() and _is_trace(each)] + folders


def _is_trace(file: Path) -> bool:
    with file.open("rb") as lines:
        first = lines.readline(2**20)
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and set(NEEDED) <= set(row)


def _rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if path.is_dir():
        return _of_parquet(path)
    if not path.is_file():
        raise ValueError(f"There is no trace at {str(path)!r}. Give the path that the run has for trace.")
    return _of_json([path, *JsonPart.of_others(path)])


def _of_json(files: list[Path]) -> Iterator[tuple[Mapping[str, Any], str]]:
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                where = f"Line {number} of {str(file)!r}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where} is no JSON: {shown(line)}. Give another folder or --trace.") from error
                yield row if isinstance(row, dict) else {"": row}, where


def _of_parquet(folder: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    if not find_spec("pyarrow"):
        raise ValueError("pyarrow, which reads Parquet, is not installed. Install lightning_dataflex[see].")
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in sorted(folder.glob("[!.]*.parquet")):
        try:
            with pq.ParquetFile(file) as table:
                columns = [name for name in READ if name in table.schema_arrow.names]
                for batch in table.iter_batches(columns=columns):
                    yield from ((row, f"A row of {str(file)!r}") for row in batch.to_pylist())
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{str(file)!r} cannot be read as Parquet: {error}. Give another trace.") from error
