"""The catalogue says of each component what it says of itself; pages lead to pages; the reference has all names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_dataflex
from lightning_dataflex import components
from lightning_dataflex.core.registry import registered_name
from tests.laws import built, scorer_of
from tests.pages import PAGES
from tests.test_vectors import CASES

DOCS = Path(__file__).parent.parent / "docs"
CATALOGUE = (DOCS / "catalogue.md").read_text()
ELSEWHERE = {"greso", "mopps", "pass_rate_band", "speed"}


def section(title: str) -> str:
    return CATALOGUE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the first table of a text, by its headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def names(cell: str) -> dict[str, str]:
    """`name(params)` in code, name to parameters."""
    return dict(re.findall(r"`(\w+)(?:\((.*?)\))?`", cell))


def entries(title: str) -> dict[str, tuple[str, dict[str, str]]]:
    return {name: (params, row) for row in rows(section(title)) for name, params in names(row["name"]).items()}


KINDS = {"scorer": "Scorers", "selector": "Selectors", "reweighter": "Reweighters"}
ALL = [(kind, name) for kind in KINDS for name in components(kind) if name not in ELSEWHERE]


@pytest.mark.parametrize("kind", KINDS)
def test_every_component_is_there_and_nothing_else(kind: str) -> None:
    assert set(entries(KINDS[kind])) == set(components(kind))


def shown(cls: type) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "normalize"}


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_parameters_and_defaults_are_those_of_the_class(kind: str, name: str) -> None:
    params, _ = entries(KINDS[kind])[name]
    written = {}
    for part in filter(None, params.split(", ")):
        key, _, default = part.partition("=")
        written[key] = eval(default, {}) if default else inspect.Parameter.empty  # our own documentation
    assert written == shown(components(kind)[name])


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_what_it_takes_and_reads_is_what_it_says(kind: str, name: str) -> None:
    _, row = entries(KINDS[kind])[name]
    made = built(kind, name)
    parts = row["per"] == "as its parts"
    if kind == "scorer":
        assert parts or row["per"] == made.granularity
        if not parts and name not in ("metadata", "ema"):
            mask = {"response_mask"} if name != "response_length" else set()
            assert set(names(row["reads"])) == set(made.requires) - mask
    else:
        assert parts or row["per"] == ", ".join(made.granularities)
        default = type(made).default_scorer
        written = next(iter(names(row["scorer by default"])), "")
        if isinstance(default, str):
            assert written == default
        else:
            assert registered_name(scorer_of(f"of {kind} {name}")) == default["name"]
        assert ("arXiv" in type(made).paper) == ("arxiv.org" in row["paper"]) or name in ("focal", "bernoulli")
        for number in re.findall(r"arXiv:([\d.]+)", type(made).paper if name != "focal" else ""):
            assert number in row["paper"]
        if default and not isinstance(default, str) and written:
            assert written.startswith(default["name"])
    if row["groups"] in ("yes", "no"):
        assert (row["groups"] == "yes") == made.needs_groups
    if kind == "reweighter":
        assert row["normalize"] == made.normalize


def test_the_last_table_has_every_component_and_every_vector_with_its_provenance() -> None:
    table = rows(section("What each is tested against"))
    listed = {name for row in table for name in names(row["component"])}
    every = {name for kind in (*KINDS, "mixer") for name in components(kind)}  # type: ignore[arg-type]
    assert every <= listed
    written = {pair for row in table for pair in re.findall(r"(\w+) \((\w+)\)", row["vectors"])}
    assert written == {(case["algorithm"], case["provenance"]) for case in CASES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text()):
        page = (path.parent / target) if target else path
        assert page.exists(), target
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M) if page.suffix == ".md" else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, anchor


def test_the_reference_has_every_public_name_and_every_component_under_its_own() -> None:
    core, parts = ((DOCS / name).read_text() for name in ("reference.md", "reference_components.md"))
    assert set(re.findall(r"^::: lightning_dataflex\.(\w+)$", core + parts, re.M)) == set(lightning_dataflex.__all__)
    for kind in (*KINDS, "mixer"):
        listed = parts.split(f"## {kind.capitalize()}s\n", 1)[1].split("\n## ", 1)[0]
        pairs = re.findall(r"### `(\w+)`\n\n::: lightning_dataflex\.(\w+)\n", listed)
        assert pairs == [(name, cls.__name__) for name, cls in components(kind).items()]  # type: ignore[arg-type]
