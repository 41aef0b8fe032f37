"""Pictures of numbers, by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from lightning_dataflex.functional.choices import shown

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
"""Of Okabe and Ito, which those who are blind to some colours tell apart."""
DASHES = ("-", "--", "-.", ":")
"""Lines differ in these too."""
KEPT_AND_REWARDS = {"kept_frac": "kept fraction", "reward_all": "reward, all", "reward_kept": "reward, kept"}
"""Of the numbers that a callback logs those that a picture of it shows, and what they are called there."""


def check_matplotlib() -> None:
    """Raise a ModuleNotFoundError where there is no matplotlib."""
    if not find_spec("matplotlib"):
        raise ModuleNotFoundError(
            "matplotlib, which draws, is not installed. Install lightning_dataflex[see].", name="matplotlib"
        )


def canvas(ax: Any = None) -> tuple[Any, Any]:
    """The axes to draw on and their figure: those that were given, or new ones of pyplot."""
    check_matplotlib()
    if ax is not None:
        if not hasattr(ax, "get_figure"):
            raise TypeError(f"ax is {shown(ax)}. Give the axes of one picture, as plt.subplots() gives them.")
        return ax.get_figure(), ax
    import matplotlib.pyplot as plt

    return plt.subplots()


def histogram(values: Any, ax: Any = None, *, label: str = "score") -> tuple[Any, Any]:
    """A histogram of the finite ones of these values: its figure and axes.

    Args:
        values: A tensor, or several, of any shape.
        ax: Axes to draw on. Default: new ones.
        label: What the values are.

    Raises:
        TypeError: They are no tensors, or `ax` is no axes.
    """
    parts = list(values) if isinstance(values, Iterable) and not isinstance(values, Tensor) else [values]
    if not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"val is {shown(values)}. Give the tensor of scores that compute() gave, or a list of such.")
    found = [x for part in parts for x in part.detach().double().flatten().cpu().tolist()]
    finite = [x for x in found if abs(x) < float("inf")]
    fig, ax = canvas(ax)
    ax.hist(finite, bins=30, color=PALETTE[0])
    ax.set(xlabel=label, ylabel="number of scores")
    if len(finite) < len(found):
        ax.set_title(f"{len(finite):,} of {len(found):,} have one", fontsize="medium")
    return fig, ax


def lines(ax: Any, steps: Sequence[float], columns: Mapping[str, Sequence[float]]) -> list[Any]:
    """A line of each column over steps; what was drawn, for a legend."""
    alone = {"marker": "o"} if len(steps) == 1 else {}
    return [
        ax.plot(steps, values, DASHES[i % len(DASHES)], color=PALETTE[i % len(PALETTE)], **alone)[0]
        for i, values in enumerate(columns.values())
    ]


def stacked(ax: Any, steps: Sequence[float], columns: Mapping[str, Sequence[float]]) -> list[Any]:
    """The columns over steps, one on top of the other; what was drawn, for a legend."""
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(columns))]
    if len(steps) > 1:
        return ax.stackplot(steps, *columns.values(), colors=colours, linewidth=0)
    values = [column[0] for column in columns.values()]
    bottoms = [sum(values[:i]) for i in range(len(values))]
    return [ax.bar(steps, value, 0.8, bottom, color=c) for value, bottom, c in zip(values, bottoms, colours)]


def logged_numbers(val: Any) -> list[dict[str, float]]:
    """What a user gives for what was logged: the numbers of a step, or of each of several.

    Raises:
        TypeError: It is something else.

    Example:
        >>> import torch
        >>> logged_numbers({"kept_frac": torch.tensor(0.5)}), logged_numbers([{"ess": 3}])
        ([{'kept_frac': 0.5}], [{'ess': 3.0}])
    """
    rows = [val] if isinstance(val, Mapping) else list(val) if isinstance(val, Iterable) else [val]
    try:
        return [{name: float(value) for name, value in row.items()} for row in rows]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"val is {shown(val)}. Give what was logged of each step, [{{'kept_frac': 0.5}}, ...], or of one."
        ) from error


def run_so_far(steps: Sequence[int], numbers: Sequence[Mapping[str, float]], ax: Any = None) -> tuple[Any, Any]:
    """What a callback has decided: proportions of domains, or kept fraction and rewards, over steps.

    Args:
        steps: Of the numbers.
        numbers: What was logged of each step, without a prefix.
        ax: Axes to draw on. Default: new ones.
    """
    if not any(numbers):
        raise ValueError("Nothing was decided yet, so there is nothing to plot. Plot after a training step.")
    shares = [name for name in numbers[-1] if name.startswith("prop_")]
    columns = {name: [row.get(name, float("nan")) for row in numbers] for name in shares or KEPT_AND_REWARDS}
    words = {name: KEPT_AND_REWARDS.get(name, name.removeprefix("prop_")) for name in columns}
    columns = {words[name]: values for name, values in columns.items() if any(name in row for row in numbers)}
    if not columns:
        columns = {name: [row.get(name, float("nan")) for row in numbers] for name in numbers[-1]}
    fig, ax = canvas(ax)
    drawn = (stacked if shares else lines)(ax, steps, columns)
    ax.set(xlabel="training step", ylabel="share of the prompts" if shares else "mean of the step's samples")
    ax.legend(drawn, list(columns))
    return fig, ax
