"""The numbers that a callback has logged, from the file of a CSVLogger."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lightning_dataflex.functional.choices import shown

PREFIX = "dataflex/"
STARTS = ("prop_", "score_")
"""Names that go on with a domain, which may hold a slash; other names hold none."""
ALWAYS = ("n_nan", "passed")
"""Names of which every callback logs one, after its label."""
MOST = 1e15
"""Numbers of this size are none that a run has meant."""


@dataclass
class Series:
    """A number over steps, in the order of steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def finite(self) -> list[float]:
        """The values that are numbers."""
        return [value for value in self.values if math.isfinite(value)]


Metrics = dict[str, dict[str, Series]]
"""By callback, `""` where there is one alone, and by name."""


def metrics_of(path: Path) -> Metrics:
    """The metrics in a `metrics.csv`; a last line that is not yet written whole is left out.

    Raises:
        ValueError: It is no file of a CSVLogger, or has no number of a callback.
    """
    rows: dict[str, dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(_whole_lines(file))
        try:
            header = next(reader, None)
            if not header:
                raise ValueError(f"{str(path)!r} has no whole line yet. Wait for the first logged step.")
            if "step" not in header:
                raise ValueError(f"{str(path)!r} has no column 'step'. Give the folder of a CSVLogger's metrics.csv.")
            ours = [(i, name.removeprefix(PREFIX)) for i, name in enumerate(header) if name.startswith(PREFIX)]
            place = header.index("step")
            for cells in reader:
                for i, name in ours:
                    if i < len(cells) and cells[i]:
                        step, value = (_number(cells[j], path, reader.line_num) for j in (place, i))
                        if math.isfinite(step):
                            rows.setdefault(name, {})[int(step)] = value
        except csv.Error as error:
            raise ValueError(
                f"{str(path)!r} is no CSV at line {reader.line_num}: {error}. Correct it there."
            ) from error
    if not rows:
        raise ValueError(
            f"{str(path)!r} has no number under {PREFIX}. Train with a DataFlexCallback, and wait for the first logged "
            "step (log_every_n_steps of the Trainer)."
        )
    found: Metrics = {}
    labels = {column.rpartition("/")[0] for column in rows if column.rpartition("/")[2] in ALWAYS}
    for column, by_step in rows.items():
        label, name = label_and_name(column, labels)
        steps = sorted(by_step)
        found.setdefault(label, {})[name] = Series(steps, [by_step[step] for step in steps])
    return found


def label_and_name(key: str, labels: Iterable[str] = ()) -> tuple[str, str]:
    """Which callback a key is of, and its name; a label may hold slashes, and so may a domain.

    Args:
        key: Without `PREFIX`.
        labels: Those that are known, `""` where there is one callback alone. A label may begin as a name does.

    Example:
        >>> label_and_name("kept_frac"), label_and_name("a/b/prop_c/d"), label_and_name("select/of_a_new_kind")
        (('', 'kept_frac'), ('a/b', 'prop_c/d'), ('select', 'of_a_new_kind'))
        >>> label_and_name("score_a/kept_frac", ["score_a"]), label_and_name("score_a/kept_frac", [""])
        (('score_a', 'kept_frac'), ('', 'score_a/kept_frac'))
    """
    # A domain called as a label and a name would make a longer label of both.
    for label in sorted(labels, key=len):
        name = key.removeprefix(f"{label}/" if label else "")
        if (not label or name != key) and (name.startswith(STARTS) or "/" not in name):
            return label, name
    parts = key.split("/")
    for i in range(len(parts)):
        name = "/".join(parts[i:])
        if name.startswith(STARTS):
            return "/".join(parts[:i]), name
    return "/".join(parts[:-1]), parts[-1]


def thinned(steps: Sequence[int], columns: dict[str, list[float]], most: int) -> tuple[list[int], dict, int]:
    """At most so many steps: the first of as many in a row, their means, and how many they are.

    Example:
        >>> thinned([0, 1, 2, 3, 4], {"a": [0.0, 1.0, 2.0, 3.0, 4.0]}, most=3)
        ([0, 2, 4], {'a': [0.5, 2.5, 4.0]}, 2)
    """
    every = -(-len(steps) // most) or 1
    starts = range(0, len(steps), every)
    means = {name: [_mean(values[i : i + every]) for i in starts] for name, values in columns.items()}
    return [steps[i] for i in starts], means, every


def table_of(series: dict[str, Series], names: Sequence[str]) -> tuple[list[int], dict[str, list[float]]]:
    """The steps at which any of these was logged, and the value of each at them, NaN where it was not."""
    there = {name: dict(zip(series[name].steps, series[name].values)) for name in names}
    steps = sorted({step for values in there.values() for step in values})
    return steps, {name: [values.get(step, math.nan) for step in steps] for name, values in there.items()}


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _number(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{str(path)!r} has {shown(text)} for a number at line {line}. Correct it there.") from None
    # What is too large to be drawn is as good as infinite, and what is infinite is no place in a chart.
    return value if abs(value) < MOST else math.nan


def _whole_lines(file: IO[str]) -> Iterator[str]:
    return (line for line in file if line.endswith("\n"))
