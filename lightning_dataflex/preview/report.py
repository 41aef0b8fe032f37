"""Previews as tables in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightning_dataflex.preview.replay import Preview
from lightning_dataflex.preview.rollouts import Rollouts

HEADINGS = ("samples", "tokens", "solved", "failed", "rule", "nan", "reward", "after")
"""Kept samples and tokens; dropped samples by reason; mean reward before and after."""


def report(rollouts: Rollouts, previews: Sequence[Preview], num_lines: int = 10) -> str:
    """All previews together, then each by domain and by step."""
    parts = [_head(rollouts)]
    deciding = [each for each in previews if not each.proportions]
    if deciding:
        rows = [(each.name, *_cells(each.totals), *_of_groups(each.totals)) for each in deciding]
        more = ("groups solved", "failed", "rule", "nan", "ess/step")
        parts.append(table([("kept, dropped", *HEADINGS, *more), *rows]))
    for each in previews:
        parts.append("\n".join([each.name, *(f"  {note}" for note in each.notes)]))
        if each.proportions:
            parts.append(_proportions(each))
        elif each.domains:
            parts.append(table([("domain", "of", *HEADINGS), *_lines(each.domains.items())]))
        if num_lines and not each.proportions:
            parts.append(table([("step", "of", *HEADINGS), *_lines(_blocks(each.steps, num_lines))]))
        elif num_lines:
            parts.append(_proportions_by_step(each, num_lines))
    return "\n\n".join(parts)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells under each other, the first column to the left.

    Example:
        >>> print(table([("a", "long"), ("wide", "1")]))
        a     long
        wide     1
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(lines)


def _head(rollouts: Rollouts) -> str:
    columns = rollouts.columns
    steps = columns["step"]
    parts = [f"{rollouts.num_samples:,} samples"]
    if "uid" in columns:
        starts = np.append(True, np.diff(steps) != 0).cumsum()
        order = np.lexsort((columns["uid"], starts))
        changes = (np.diff(columns["uid"][order]) != 0) | (np.diff(starts[order]) != 0)
        parts.append(f"{1 + int(changes.sum()):,} groups")
    parts += [f"{len(np.unique(steps)):,} steps", f"{int(columns['length'].sum()):,} tokens"]
    parts += [f"{len(rollouts.domains):,} domains"] if rollouts.domains else []
    return "\n".join([", ".join(parts), *(f"  {note}" for note in rollouts.notes)])


def _cells(sums: dict[str, Any]) -> tuple[str, ...]:
    reasons = [f"{sums[f'samples_{name}']:,}" for name in ("solved", "failed", "rule", "nan")]
    shares = [_share(sums[f"{name}_kept"], sums[name]) for name in ("samples", "tokens")]
    return (*shares, *reasons, _number(sums["reward"]), _number(sums["reward_after"]))


def _of_groups(totals: dict[str, Any]) -> tuple[str, ...]:
    groups = [f"{totals[key]:,.0f}" if key in totals else "" for key in _GROUPS]
    return (*groups, f"{totals['ess']:,.1f}")


_GROUPS = ("dropped_solved", "dropped_failed", "dropped_rule", "dropped_nan")


def _lines(named: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, ...]]:
    return [(name, f"{sums['samples']:,}", *_cells(sums)) for name, sums in named]


def _blocks(steps: Sequence[dict[str, Any]], num_lines: int) -> list[tuple[str, dict[str, Any]]]:
    """Steps in so many lines: sums of those of a line, and mean rewards by what they are the means of."""
    found = []
    for part in np.array_split(np.arange(len(steps)), min(num_lines, len(steps))):
        each = [steps[i] for i in part]
        sums = {key: sum(step[key] for step in each) for key in each[0]}
        for key, weight in (("reward", "rewarded"), ("reward_after", "weight")):
            total = sum(step[weight] for step in each)
            sums[key] = (
                sum(step[key] * step[weight] for step in each if step[weight]) / total if total else float("nan")
            )
        first, last = each[0]["step"], each[-1]["step"]
        found.append((f"{first}" if first == last else f"{first}-{last}", sums))
    return found


def _proportions(preview: Preview) -> str:
    total = preview.totals["samples"]
    rows = [
        (name, _share(preview.domains.get(name, {}).get("samples", 0), total), f"{share:.1%}")
        for name, share in preview.proportions.items()
    ]
    return table([("domain", "samples", "proportion after"), *rows])


def _proportions_by_step(preview: Preview, num_lines: int) -> str:
    names = list(preview.proportions)
    picked = np.unique(np.linspace(0, len(preview.steps) - 1, min(num_lines, len(preview.steps))).astype(int))
    rows = [
        (f"{preview.steps[i]['step']}", *(f"{preview.steps[i][f'prop_{name}']:.1%}" for name in names)) for i in picked
    ]
    return table([("proportion at step", *names), *rows])


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _number(value: float) -> str:
    return "" if value != value else f"{value:.4f}"
