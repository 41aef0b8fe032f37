"""What a report has to say of each callback: charts and final numbers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dataflex.report.charts import Chart, rates_over_steps
from lightning_dataflex.report.drawing import MOST_POINTS, MOST_SERIES, chart_over_steps, largest, with_pictures
from lightning_dataflex.report.metrics import STARTS, Series, table_of, thinned
from lightning_dataflex.report.trace import StepOfTrace, rates_of

WORDS = {
    "kept_frac": "kept fraction",
    "frac_zero_std": "groups without signal",
    "reward_all": "before (all samples)",
    "reward_kept": "after (kept samples)",
    "weight_mean": "mean",
    "weight_std": "standard deviation",
    "ess": "effective sample size",
    "dropped_solved": "solved",
    "dropped_failed": "failed",
    "dropped_rule": "by the rule",
    "dropped_nan": "without a score",
}
REASON_WORDS = {"kept": "kept", "solved": "solved", "failed": "failed", "rule": "by the rule", "nan": "without a score"}


@dataclass(frozen=True)
class Section:
    """What there is of one callback, or of its trace.

    Attributes:
        title: Of what.
        name: Of the table, told apart from others on a page by this.
        charts: In order.
        header: Of the table of numbers.
        numbers: Its rows.
    """

    title: str
    name: str
    charts: list[Chart]
    header: Sequence[str]
    numbers: Sequence[Sequence[Any]]


def section_of_metrics(label: str, series: dict[str, Series], slug: str) -> Section:
    """What a callback has logged."""
    rows = [(name, *_final(each)) for name, each in series.items()]
    header = ("number", "steps", "first", "last", "mean", "least", "most")
    return Section(
        label or "The callback", _joined(slug, "numbers"), list(_charts_of_metrics(series, slug)), header, rows
    )


def section_of_trace(label: str, steps: dict[int, StepOfTrace], slug: str) -> Section:
    """What became of the samples that a callback has decided on."""
    reasons = {name: sum(step.reasons[name] for step in steps.values()) for name in _reasons(steps)}
    num_tokens = sum(step.tokens for step in steps.values())
    num_trained = sum(step.tokens_trained for step in steps.values())
    rows = [
        ("steps", len(steps)),
        ("samples", sum(reasons.values())),
        *((f"samples: {REASON_WORDS.get(name, name)}", num) for name, num in reasons.items()),
        ("tokens generated", num_tokens),
        ("tokens trained on", num_trained),
        ("share of the tokens trained on", num_trained / num_tokens if num_tokens else math.nan),
    ]
    title = f"Samples: {label}" if label else "Samples"
    return Section(
        title, _joined(slug, "numbers"), list(_charts_of_trace(steps, slug)), ("of the trace", "in all"), rows
    )


def slug_of(text: str) -> str:
    """A text as a part of a file's name.

    Example:
        >>> slug_of("select.group_solve_rate/../"), slug_of("领域")
        ('select-group_solve_rate', '')
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:60]


def _charts_of_metrics(series: dict[str, Series], slug: str) -> Iterator[Chart]:
    make = functools.partial(_chart, series, slug)
    if _has(series, "reward_all", "reward_kept"):
        yield make("reward", "Reward before and after selection", ("reward_all", "reward_kept"), "mean reward")
    if _has(series, "kept_frac"):
        names = [name for name in ("kept_frac", "frac_zero_std") if name in series]
        yield make("kept", "Kept fraction", names, "share of the step", ylim=(0, 1.02))
    drops = [name for name in ("dropped_solved", "dropped_failed", "dropped_rule", "dropped_nan") if name in series]
    if drops:
        note = "Groups of which no sample is kept, by reason."
        yield make("drops", "Groups dropped, by reason", drops, "groups per step", is_stacked=True, note=note)
    weights = [name for name in ("weight_mean", "weight_std") if name in series]
    if weights:
        yield make("weights", "Weights", weights, "weight of a token", ylim=(0, None))
    if _has(series, "ess"):
        note = "How many samples of equal weight would say as much."
        yield make("ess", "Effective sample size", ["ess"], "samples", ylim=(0, None), note=note)
    shares = [name for name in series if name.startswith("prop_")]
    if shares:
        title = "Proportions of the domains"
        yield make("proportions", title, shares, "share of the prompts", is_stacked=True, ylim=(0, 1))
    scores = [name for name in series if name.startswith("score_")]
    if scores:
        yield make("scores", "Scores of the domains", scores, "mean score")


def _joined(slug: str, name: str) -> str:
    return f"{slug}-{name}" if slug else name


def _has(series: dict[str, Series], *names: str) -> bool:
    return all(name in series for name in names)


def _chart(
    series: dict[str, Series],
    slug: str,
    name: str,
    title: str,
    names: Sequence[str],
    ylabel: str,
    note: str = "",
    **options: Any,
) -> Chart:
    steps, columns = table_of(series, names)
    words = {key: WORDS.get(key) or key.removeprefix(next(filter(key.startswith, STARTS), "")) for key in names}
    columns = {words[key]: values for key, values in columns.items()}
    if len(columns) > MOST_SERIES:
        columns = largest(columns, is_sum=options.get("is_stacked", False))
    return chart_over_steps(slug, name, title, steps, columns, ylabel, note, **options)


def _charts_of_trace(steps: dict[int, StepOfTrace], slug: str) -> Iterator[Chart]:
    order, every = list(steps), list(steps.values())
    if any(step.outcomes for step in every):
        yield _chart_of_rates(steps, slug)
    tokens = {
        "generated": [float(step.tokens) for step in every],
        "trained on": [float(step.tokens_trained) for step in every],
    }
    more: dict[str, Any] = {"xlabel": "training step", "ylim": (0, None)}
    yield chart_over_steps(
        slug, "tokens", "Tokens generated and trained on", order, tokens, "response tokens per step", **more
    )
    reasons = {REASON_WORDS.get(key, key): [float(step.reasons[key]) for step in every] for key in _reasons(steps)}
    note = "A group without signal is dropped as solved or failed."
    more = {"xlabel": "training step", "is_stacked": True, "note": note}
    yield chart_over_steps(slug, "reasons", "What became of the samples", order, reasons, "samples per step", **more)


def _chart_of_rates(steps: dict[int, StepOfTrace], slug: str) -> Chart:
    rates, counts = rates_of(steps.values())
    columns = {f"{rate:.3g}": [float(row[i]) for row in counts] for i, rate in enumerate(rates)}
    few, means, every = thinned(list(steps), columns, MOST_POINTS)
    table = [[values[i] for values in means.values()] for i in range(len(few))]
    num, solved, failed = sum(map(sum, counts)), sum(row[-1] for row in counts), sum(row[0] for row in counts)
    alt = f"Solve rates of {num} groups over {len(steps)} steps: {solved} at 1, {failed} at 0."
    note = f"Each column is the mean of {every} steps." if every > 1 else ""
    draw = functools.partial(rates_over_steps, steps=few, rates=rates, counts=table)
    rows = [(step, *row) for step, row in zip(few, table)]
    return with_pictures(slug, "rates", "Solve rates of the groups", draw, alt, note, ("step", *means), rows)


def _reasons(steps: dict[int, StepOfTrace]) -> list[str]:
    """Those that occur, in the order of `REASON_WORDS`."""
    found = dict.fromkeys(name for step in steps.values() for name in step.reasons)
    return [*(name for name in REASON_WORDS if name in found), *(name for name in found if name not in REASON_WORDS)]


def _final(series: Series) -> tuple[float, ...]:
    finite = series.finite
    mean = math.fsum(finite) / len(finite) if finite else math.nan
    least, most = (min(finite), max(finite)) if finite else (math.nan, math.nan)
    return len(series.steps), series.values[0], series.values[-1], mean, least, most
