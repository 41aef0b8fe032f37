"""The charts of a report, each with a table of what it shows."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_dataflex.core.figures import PALETTE, lines, stacked

INK, RULE = "#16191d", "#c9ced6"
"""Of text and of lines behind the data; in a page they follow the reader's scheme."""
SIZE = (4.8, 3.1)
"""Inches: at the width of a phone its text has the size of the page's."""
MOST_BESIDE = 40
"""Characters of the labels of two columns of a legend that have room beside each other."""
SETTINGS: Any = {
    "font.size": 10,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": RULE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Chart:
    """A picture, and the numbers in it.

    Attributes:
        name: Of its file.
        title: What it shows.
        alt: The same in a sentence, for those who do not see it.
        note: What there is to say about it.
        header: Of the table.
        rows: Of the table.
        svg: The picture with text as text, and colours that a page can replace.
        png: The picture on white.
    """

    name: str
    title: str
    alt: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[float]]
    svg: str = field(repr=False)
    png: bytes = field(repr=False)


@contextmanager
def house_style() -> Iterator[None]:
    """matplotlib's settings for a report, and its own afterwards."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # The page shows such letters by a font of the reader's; in a PNG they are boxes.
        warnings.filterwarnings("ignore", r"Glyph \d+")
        yield


def pictures(name: str, title: str, draw: Callable[[Any], None]) -> tuple[str, bytes]:
    """A picture as SVG, for a page that gives its title, and as PNG.

    Args:
        name: Told apart from others on a page by this.
        title: What it shows.
        draw: Draws on the figure.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with house_style(), matplotlib.rc_context({"svg.hashsalt": name}):
        figure = Figure(SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.savefig(png, format="png", dpi=160, facecolor="white")
    return _inline(svg.getvalue(), name), png.getvalue()


def over_steps(
    figure: Any,
    steps: Sequence[float],
    columns: dict[str, list[float]],
    *,
    ylabel: str,
    xlabel: str = "optimiser step",
    is_stacked: bool = False,
    ylim: tuple[float, float | None] | None = None,
) -> Any:
    """Axes with the columns over steps, and what they are above them."""
    ax = figure.add_subplot(1, 1, 1)
    drawn = (stacked if is_stacked else lines)(ax, steps, columns)
    ax.set(ylabel=ylabel, xlabel=xlabel)
    if ylim is not None:
        ax.set_ylim(*ylim)
    ax.margins(x=0.01)
    ax.xaxis.get_major_locator().set_params(integer=True, nbins=6, min_n_ticks=1)
    if len(columns) > 1:
        labels = list(columns)
        beside = max(map(len, labels[: (len(labels) + 1) // 2])) + max(map(len, labels[(len(labels) + 1) // 2 :]))
        ncols = 2 if beside <= MOST_BESIDE else 1
        ax.legend(drawn, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols, borderaxespad=0.2)
    return ax


def rates_over_steps(
    figure: Any, steps: Sequence[int], rates: Sequence[float], counts: Sequence[Sequence[float]]
) -> None:
    """How many groups have which solve rate, as shades over steps."""
    import numpy as np

    ax = figure.add_subplot(1, 1, 1)
    table = np.asarray(counts, dtype=float).T
    shown = np.ma.masked_equal(table, 0)
    edges = np.append(np.asarray(steps), steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1))
    half = rates[1] / 2
    mesh = ax.pcolormesh(edges, np.asarray([*rates, 1 + 2 * half]) - half, shown, cmap="cividis", vmin=0)
    ax.set(xlabel="training step", ylabel="solve rate (share of a group)")
    ax.grid(False)
    ax.xaxis.get_major_locator().set_params(integer=True, nbins=6, min_n_ticks=1)
    figure.colorbar(mesh, ax=ax, label="groups per step", pad=0.02)


def _inline(svg: str, name: str) -> str:
    """An SVG to stand in a page: without a header, with ids of its own and colours of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" ', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*" ', r"<svg \1", svg, count=1)
    svg = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in ((INK, "--ink"), (RULE, "--rule"), *((c, f"--c{i}") for i, c in enumerate(PALETTE))):
        svg = svg.replace(colour, f"var({variable})")
    return svg
