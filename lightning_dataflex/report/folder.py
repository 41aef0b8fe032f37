"""What a run has left in its folder."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dataflex.core.checks import is_whole
from lightning_dataflex.core.files import TRACE_SUFFIXES, blocks_in, plain_config, within
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.report.agreement import doubts
from lightning_dataflex.report.metrics import Metrics, metrics_of
from lightning_dataflex.report.trace import Trace, trace_of, traces_in
from lightning_dataflex.trace_files import Part

METRICS = "metrics.csv"
CONFIG = "config.yaml"
CONFIGS = (CONFIG, "hparams.yaml")
MOST_CHARACTERS = 200_000
"""Of a configuration, as the page shows it."""


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        folder: Where its metrics are.
        written: When they were last written, in the time of this machine.
        metrics: Of each callback; none where there is a trace alone.
        trace: Of each callback; none where the run has written none.
        configs: The files of its configuration, by name.
        notes: What a reader has to know of these files.
    """

    folder: Path
    written: str
    metrics: Metrics
    trace: Trace
    configs: dict[str, str]
    notes: list[str]


def run_in(given: str | Path, trace: str | Path | None = None) -> Run:
    """The run whose files are in this folder, or in one below it.

    Args:
        given: The folder.
        trace: Where its decision trace is. Default: where its configuration says, or if none is there, looked for in
            the folder.

    Raises:
        ValueError: There is no such folder, or nothing of a run in it, or several runs.
    """
    top = Path(given)
    if not top.is_dir():
        what = "is a file" if top.exists() else "is not there"
        raise ValueError(f"The run's folder {str(given)!r} {what}. Give the folder with {METRICS} in it.")
    folder = _folder_with_metrics(top)
    settings = _settings(folder)
    named = [Path(each) for each in _traces_of(settings)]
    there = [each for each in named if Part.of(each).ranks()]
    traces = [Path(trace)] if trace else there or traces_in(folder) or traces_in(top)
    file = folder / METRICS
    if not file.is_file() and not traces:
        raise ValueError(
            f"There is no {METRICS} in {str(given)!r} or below it, and no trace. Give the folder of a run with a "
            "CSVLogger, as trainer.log_dir names it."
        )
    merged: Trace = {}
    for each in traces:
        found = trace_of(each)
        twice = sorted(set(found) & set(merged))
        if twice:
            raise ValueError(
                f"{str(given)!r} has two traces of {shown(twice[0])}, one of them {each.name!r}. Name one by --trace."
            )
        merged |= found
    seen = [each for each in (file, *traces) if each.exists()]
    last = datetime.datetime.fromtimestamp(max(each.stat().st_mtime for each in seen))
    texts = {name: _text(folder / name) for name in CONFIGS if (folder / name).is_file()}
    configs = {name: text for name, text in texts.items() if text}
    metrics = metrics_of(file) if file.is_file() else {}
    notes = doubts(metrics, merged, _accumulated(settings))
    if trace is None:
        missed = [each for each in named if each not in there]
        notes += [f"{CONFIG} has trace: {each}, and there is none. Name it by --trace." for each in missed]
        if traces and not there and blocks_in(settings):
            notes.append(
                f"{traces[0].name} is not named in {CONFIG} and may be of another run. Name its own by --trace"
            )
    return Run(folder, f"{last:%Y-%m-%d %H:%M:%S}", metrics, merged, configs, notes)


def _settings(folder: Path) -> Any:
    file = folder / CONFIG
    try:
        return plain_config(file) if file.is_file() else None
    except ValueError:
        # The page shows it as it is, whatever it holds.
        return None


def _traces_of(settings: Any) -> list[str]:
    found = [within(block, "trace") for block in blocks_in(settings)]
    return [trace for trace in found if isinstance(trace, str) and Path(trace).suffix in TRACE_SUFFIXES]


def _accumulated(settings: Any) -> int | None:
    num = within(settings, "trainer", "accumulate_grad_batches")
    return num if is_whole(num) and num > 0 else None


def _folder_with_metrics(top: Path) -> Path:
    if (top / METRICS).is_file():
        return top
    found = sorted(file.parent for file in top.rglob(METRICS) if file.is_file())
    if len(found) > 1:
        named = ", ".join(str(each) for each in found[:5])
        raise ValueError(f"There are {len(found)} runs in {str(top)!r}. Give the folder of one: {named}.")
    return found[0] if found else top


def _text(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as lines:
        text = lines.read(MOST_CHARACTERS + 1)
    # A run without hyperparameters leaves an empty mapping.
    if text.strip() in ("", "{}"):
        return ""
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "\n... (longer than shown)"
