"""The page of a report: one file of HTML that loads nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from lightning_dataflex.core.figures import PALETTE
from lightning_dataflex.report.charts import INK, RULE, Chart
from lightning_dataflex.report.folder import Run
from lightning_dataflex.report.sections import Section

NO_TRACE = (
    "Solve rates of the groups, tokens generated and trained on, and what became of each sample come from a decision "
    "trace, and there is none in the folder. Give the dataflex block trace: PATH, or name the trace by --trace PATH."
)
DARK = ("#58a6e6", "#f0803c", "#2fc79b", "#e29cc3", "#f2b134", "#8ccdf5", "#a8a8a8")
"""`PALETTE` on a dark ground."""

_CSS = f"""
:root {{ --ground: #ffffff; --ink: {INK}; --rule: {RULE}; --quiet: #565d68; --link: #0b5cad;
  {" ".join(f"--c{i}: {colour};" for i, colour in enumerate(PALETTE))} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #14171b; --ink: #e7eaee; --rule: #3b424c; --quiet: #a3abb6; --link: #79b8ff;
    {" ".join(f"--c{i}: {colour};" for i, colour in enumerate(DARK))} }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }}
main {{ max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .5rem; border-top: 1px solid var(--rule); padding-top: 1rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .25rem; }}
p, figcaption, summary {{ color: var(--quiet); }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem; }}
figure {{ margin: 0; min-width: 0; }}
svg {{ display: block; stroke-linejoin: round; width: 100%; max-width: 36rem; height: auto; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
.wide {{ overflow-x: auto; margin-bottom: 1rem; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid var(--rule);
  overflow-wrap: normal; }}
th {{ vertical-align: bottom; font-weight: 600; }}
th:first-child, td:first-child {{ text-align: left; min-width: 9.5rem; overflow-wrap: anywhere; }}
summary {{ cursor: pointer; font-size: .875rem; padding: .25rem 0; }}
pre {{ overflow-x: auto; font-size: .8125rem; padding: .75rem; border: 1px solid var(--rule); }}
"""


def page_of(run: Run, sections: Sequence[Section]) -> str:
    """The page; every text in it that comes from the run is escaped."""
    last = max((each.steps[-1] for series in run.metrics.values() for each in series.values()), default=None)
    facts = f"Written up to {run.written}" + (f"; last logged step {last}." if last is not None else ".")
    body = [
        f"<h1>What was trained on: {_text(str(run.folder))}</h1>",
        f"<p>{_text(facts)} A run that goes on has more to say later: make the page again.</p>",
        *(f"<p><strong>{_text(note)}</strong></p>" for note in run.notes),
        *map(_section, sections),
    ]
    if not run.metrics:
        body.append("<p>There is no metrics.csv here: what the callback has logged is left out. Add a CSVLogger.</p>")
    if not run.trace:
        body.append(f'<h2>Samples</h2>\n<p id="no-trace">{_text(NO_TRACE)}</p>')
    body += [
        f"<h2>Configuration: {_text(name)}</h2>\n<details><summary>Show</summary><pre>{_text(text)}</pre></details>"
        for name, text in run.configs.items()
    ]
    if not run.configs:
        body.append("<h2>Configuration</h2>\n<p>The folder has no config.yaml, which dataflex fit writes.</p>")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(run.folder.name or str(run.folder))}: what was trained on</title>",
            f"<style>{_CSS}</style>",
            "</head>",
            "<body><main>",
            *body,
            "</main></body>",
            "</html>",
            "",
        ]
    )


def _section(section: Section) -> str:
    charts = "\n".join(map(_chart, section.charts))
    table = _table(section.header, section.numbers, section.name)
    return f'<h2>{_text(section.title)}</h2>\n{table}\n<div class="charts">\n{charts}\n</div>'


def _chart(chart: Chart) -> str:
    svg = chart.svg.replace("<svg ", f'<svg role="img" aria-label="{_text(chart.alt)}" ', 1)
    caption = f"<figcaption>{_text(chart.note)}</figcaption>" if chart.note else ""
    table = f"<details><summary>As a table</summary>{_table(chart.header, chart.rows, chart.name)}</details>"
    return f"<figure><h3>{_text(chart.title)}</h3>\n{svg}\n{caption}{table}</figure>"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], name: str) -> str:
    head = "".join(f'<th scope="col">{_text(each)}</th>' for each in header)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(_cell(each))}</td>" for each in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table data-name="{_text(name)}"><tr>{head}</tr>\n{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return str(value)


def _text(text: str) -> str:
    """A text of the run in a page: escaped, and without what is not to be seen."""
    seen = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
    return html.escape(seen)
