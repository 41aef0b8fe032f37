"""`dataflex report`: a page, and its pictures, of a run that is over or goes on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_dataflex.core.figures import check_matplotlib
from lightning_dataflex.report.folder import Run, run_in
from lightning_dataflex.report.page import page_of
from lightning_dataflex.report.sections import Section, section_of_metrics, section_of_trace, slug_of

NAME = "dataflex-report.html"


def reported(args: Sequence[str]) -> str:
    """Write the page and its pictures; a line that says where, and one for each doubt about the files.

    Raises:
        ValueError: There is no run, something in it cannot be read, or nothing can be written there.
        ModuleNotFoundError: matplotlib is not installed.
    """
    given = _parser().parse_args(args)
    check_matplotlib()
    run = run_in(given.run_dir, given.trace)
    out = Path(given.out) if given.out else run.folder / NAME
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        what = f"--out is {given.out!r}" if given.out else f"{str(out)!r} is a folder"
        raise ValueError(f"{what}. Give the file of a page, --out report.html.")
    sections = sections_of(run)
    charts = [chart for section in sections for chart in section.charts]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            (out.parent / f"{out.stem}-{chart.name}.png").write_bytes(chart.png)
        # Whoever has the page open sees the old one or the new one.
        unfinished = out.with_name(f".{out.name}")
        unfinished.write_text(page_of(run, sections), encoding="utf-8")
        os.replace(unfinished, out)
    except OSError as error:
        raise ValueError(f"{str(out)!r} cannot be written: {error.strerror}. Give another file as --out.") from error
    said = [f"{out} and {len(charts)} pictures beside it ({out.stem}-*.png)"]
    return "\n".join(said + [f"warning: {note}" for note in run.notes])


def sections_of(run: Run) -> list[Section]:
    """What there is to say of each callback of a run, and of its trace."""
    taken: set[str] = set()

    def slug(label: str, kind: str) -> str:
        name = "-".join(filter(None, (kind, slug_of(label))))
        name = next(each for each in (name, *(f"{name}{i}" for i in range(2, 1000))) if each not in taken)
        taken.add(name)
        return name

    metrics = [section_of_metrics(label, series, slug(label, "")) for label, series in run.metrics.items()]
    return metrics + [section_of_trace(label, steps, slug(label, "trace")) for label, steps in run.trace.items()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("dataflex report", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run, with the metrics.csv of a CSVLogger")
    parser.add_argument("--out", metavar="FILE", help=f"the page to write (default: {NAME} in that folder)")
    parser.add_argument("--trace", metavar="PATH", help="the decision trace (default: as config.yaml says)")
    return parser
