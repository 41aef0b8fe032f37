"""Charts from columns of numbers: thinned, named and drawn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_dataflex.report.charts import Chart, over_steps, pictures
from lightning_dataflex.report.metrics import thinned

MOST_POINTS = 300
"""Steps in a chart and its table; of a longer run the means of several."""
MOST_CHARACTERS = 24
"""Of a domain's name in a legend."""
MOST_SERIES = 6
"""Domains in a chart; the others are one."""


def chart_over_steps(
    slug: str,
    name: str,
    title: str,
    steps: Sequence[int],
    columns: dict[str, list[float]],
    ylabel: str,
    note: str = "",
    **options: Any,
) -> Chart:
    """A chart of columns over steps, of a long run in means; `options` are those of `over_steps`."""
    few, means, every = thinned(steps, columns, MOST_POINTS)
    if every > 1:
        note = f"{note} Each point is the mean of {every} steps.".strip()
    shown = dict(zip(_legible(means), means.values()))
    if options.get("is_stacked"):
        zeroed = {key: [0.0 if math.isnan(x) else x for x in values] for key, values in shown.items()}
        never = [key for key, values in zeroed.items() if not any(values)]
        # All of them have a place in the legend where there is nothing else to show.
        shown = {key: values for key, values in zeroed.items() if key not in never} or zeroed
        note = f"{note} None: {', '.join(never)}.".strip() if never else note
    draw = functools.partial(over_steps, steps=few, columns=shown, ylabel=ylabel, **options)

    rows = [(step, *(values[i] for values in means.values())) for i, step in enumerate(few)]
    return with_pictures(slug, name, title, draw, alt_of(title, steps, columns), note, ("step", *means), rows)


def with_pictures(
    slug: str,
    name: str,
    title: str,
    draw: Callable[[Any], None],
    alt: str,
    note: str,
    header: Sequence[str],
    rows: Sequence[Sequence[float]],
) -> Chart:
    """A chart that `draw` draws on a figure; its file is called by `slug` and `name`."""
    name = f"{slug}-{name}" if slug else name
    svg, png = pictures(name, title, draw)
    return Chart(name, title, alt, note, header, rows, svg, png)


def alt_of(title: str, steps: Sequence[int], columns: dict[str, list[float]]) -> str:
    """What a chart shows, in a sentence.

    Example:
        >>> alt_of("Kept", [0, 4], {"kept fraction": [0.25, 0.5]})
        'Kept, steps 0 to 4: kept fraction from 0.25 to 0.5.'
    """
    parts = [f"{name} from {values[0]:.3g} to {values[-1]:.3g}" for name, values in columns.items()]
    return f"{title}, steps {steps[0]} to {steps[-1]}: {', '.join(parts)}."


def largest(columns: dict[str, list[float]], *, is_sum: bool) -> dict[str, list[float]]:
    """The largest of many columns, and what the others come to, or their mean."""

    def size(name: str) -> float:
        return -math.fsum(abs(value) for value in columns[name] if math.isfinite(value))

    first = sorted(columns, key=size)[: MOST_SERIES - 1]
    rest = [values for name, values in columns.items() if name not in first]
    finite = [[value for value in row if math.isfinite(value)] for row in zip(*rest)]
    others = [math.fsum(row) / (1 if is_sum else max(len(row), 1)) if row else math.nan for row in finite]
    return {name: columns[name] for name in first} | {f"{len(rest)} others": others}


def _legible(names: Iterable[str]) -> list[str]:
    """Names that fit into a legend, and differ still."""
    found: list[str] = []
    for name in names:
        seen = "".join(char if char.isprintable() else "\ufffd" for char in name)
        short = seen if len(seen) <= MOST_CHARACTERS else f"{seen[: MOST_CHARACTERS - 1]}…"
        found.append(f"{short} ({len(found) + 1})" if short in found else short)
    return found
