"""The page of reported faults names each of them once, and every test that holds one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text()
IDS = [f"R{number:03}" for number in range(1, 69)]
KINDS = {
    "degenerate_group", "all_filtered", "nonfinite", "mask_padding", "grouping", "baseline_leak", "loss_normalisation",
    "weights_semantics", "filter_semantics", "ddp_collectives", "batch_divisibility", "alignment", "mixer_proportions",
    "sampler_ddp", "resume_state", "metrics", "callback_lifecycle", "numeric_limits",
}  # fmt: skip


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if re.match(r"\| R\d", line)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def names_there() -> set[str]:
    """`file::name` of every test, by its text."""
    return {
        f"{path.relative_to(TESTS).as_posix()}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_reported_fault_has_one_row_with_its_kind_its_source_and_an_answer() -> None:
    assert [row[0] for row in rows()] == IDS
    assert {kind for _, kind, *_ in rows()} == KINDS
    for name, _, reported, here, tests in rows():
        assert re.search(r"\([\w.-]+(/[\w.-]+)?#\d+", reported), name
        assert here, name
        assert f"test_{name}_" in tests or "cannot arise" in here, name


def test_the_tests_that_it_names_are_those_that_there_are() -> None:
    there, named = names_there(), [name for row in rows() for name in re.findall(r"`([\w/.]+::\w+)`", row[4])]
    assert [name for name in named if name not in there] == []
    of_cases = {name for name in there if "::test_R0" in name}
    assert sorted(of_cases) == sorted(name for name in named if "::test_R0" in name)
    for row in rows():
        for name in re.findall(r"::test_(R\d+)_", row[4]):
            assert name == row[0]


def test_every_kind_has_a_test_of_its_own() -> None:
    of_kinds = [name.split("::test_kind_")[1] for name in names_there() if "::test_kind_" in name]
    assert {kind for kind in KINDS if not any(name.startswith(f"{kind}_") for name in of_kinds)} == set()
