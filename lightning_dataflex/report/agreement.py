"""Whether a trace can be of the run whose metrics are beside it, by the numbers that both of them hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from lightning_dataflex.core.checks import listed
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.report.metrics import Metrics, Series
from lightning_dataflex.report.trace import StepOfTrace, Trace

CURE = "Name that of this run by --trace."
REWARDS = ("reward_all", "reward_kept")


def doubts(metrics: Metrics, trace: Trace, accumulated: int | None = None) -> list[str]:
    """What speaks against it that they are of one run, at most a text for each callback.

    Args:
        metrics: What was logged by optimiser steps.
        trace: What was traced by training batches.
        accumulated: Batches of an optimiser step. Default: not known.

    Example:
        >>> steps = {0: StepOfTrace(rewards=[2.0, 4]), 1: StepOfTrace()}
        >>> doubts({"": {"reward_all": Series([0], [0.5])}}, {"rule": steps}), doubts({"a": {}}, {"rule": steps})
        ([], ["The trace is of 'rule', and metrics.csv of 'a'. Name that of this run by --trace."])
    """
    if metrics and set(metrics) == {""} and len(trace) > 1:
        return [f"The trace is of {len(trace)} callbacks, {listed(map(shown, trace))}, and metrics.csv of one. {CURE}"]
    found: list[str] = []
    for label, steps in trace.items():
        logged = [series for name, series in metrics.items() if _is_of(label, name)]
        if logged:
            found += islice(_differences(label, logged[0], steps, accumulated), 1)
        elif metrics:
            found.append(f"The trace is of {shown(label)}, and metrics.csv of {listed(map(shown, metrics))}. {CURE}")
    return found


def _is_of(label: str, name: str) -> bool:
    """Whether a callback that a trace calls so can be that of the log, where a mechanism may stand for it."""
    return name in ("", label) or label.startswith(f"{name}.")


def _differences(
    label: str, series: dict[str, Series], steps: dict[int, StepOfTrace], accumulated: int | None
) -> Iterator[str]:
    # Of the last step there may be more to be written.
    whole = dict(list(steps.items())[:-1])
    for name in REWARDS:
        if name not in series:
            continue
        logged = series[name]
        for step, value in zip(logged.steps, logged.values):
            places = _batches(logged, step, whole, accumulated)
            traced = [whole[place].mean_reward(name) for place in places if place in whole]
            known = [each for each in traced if each is not None]
            if len(known) == len(places) and known and not any(_same(value, each) for each in known):
                what = f"{value:.6g} at step {step} in metrics.csv"
                there = f"{known[0]:.6g} in the trace" if len(known) == 1 else "at none of its batches in the trace"
                yield (
                    f"The trace of {shown(label)} is of another run, or part of it is missing: {name} is {what} and "
                    f"{there}. {CURE}"
                )


def _batches(logged: Series, step: int, whole: dict[int, StepOfTrace], accumulated: int | None) -> range:
    """The training batches of which the log can have a step's numbers; none where they are not known."""
    if accumulated is not None:
        # A step takes so many batches at most, and one at least, as the last of an epoch may.
        return range(step, (step + 1) * accumulated)
    every = min((b - a for a, b in zip(logged.steps, logged.steps[1:])), default=1)
    if max(whole, default=0) < logged.steps[-1] + every:
        return range(step, step + 1)
    # There are more batches than optimiser steps, as many for each of them as nobody says.
    return range(step, max(whole) + 1) if step == logged.steps[0] else range(0)


def _same(a: float, b: float) -> bool:
    return not math.isfinite(a) or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
