"""The share of small faults in `functional/` and `core/` that the tests notice.

    python benchmarks/mutants.py --sample 600 --seed 0 [--only lightning_dataflex/functional/loss.py]

Needs the extra `mutants`. cosmic-ray changes one operator, number, keyword, loop, handler or decorator at a time. The
tests that cover the changed statement run in a forked child, those that run little else first, up to the first that
fails. The child inherits all modules and puts the changed function into place; for a change outside of functions it
imports them anew. Prints the mutants that live, and a table. A mutant that hangs counts as killed. With `--control`
nothing is changed, and it prints those that are killed all the same.

Not changed: annotations, texts (docstrings, f-strings, what is raised or warned) and `__repr__`. Not run: tests that
start processes, tests of 3 seconds or more, and what goes beyond `--budget` seconds of tests for one mutant.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import jsonargparse
import lightning.pytorch
import tensordict
import torch
import torchmetrics
import transformers
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from trials import HANGS, end, recorded, start, tried

INHERITED = (jsonargparse, lightning.pytorch, tensordict, torchmetrics, transformers)
ROOT = Path(__file__).resolve().parent.parent
PARTS = ("lightning_dataflex/functional", "lightning_dataflex/core")
PROCESSES = (
    "cases_ranks",
    "cli",
    "configs",
    "docs",
    "epochs",
    "faults",
    "gpu",
    "killed",
    "metric",
    "ranks",
    "ranks_types",
    "rows",
    "soak",
    "strategies",
)
TESTS = ["tests", "lightning_dataflex", "--ignore=tests/examples", *(f"--ignore=tests/test_{n}.py" for n in PROCESSES)]
SLOW = 3.0
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Div|Mod_FloorDiv|Pow_Mul|BitOr_BitAnd)"
    r"|ReplaceBinaryOperator_BitAnd_BitOr|ReplaceUnaryOperator_Delete_(Not|USub|Invert)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_(LtE|Gt)|LtE_(Lt|GtE)|Gt_(GtE|Lt)|GtE_(Gt|LtE)|Is_IsNot|IsNot_Is)"
    r"|Replace(True|False|And|Or|Break|Continue)With\w+|AddNot|ExceptionReplacer|NumberReplacer|RemoveDecorator"
    r"|ZeroIterationForLoop)"
)
"""Those whose result mostly still runs: what dies of a TypeError at once would only polish the figure."""


class Mutant(NamedTuple):
    """One fault: what `operator` does at the `occurrence`-th of its places in `file`."""

    file: str
    place: tuple[int, int]
    operator: str
    occurrence: int

    def before(self) -> str:
        return (ROOT / self.file).read_text()

    def after(self) -> str:
        return mutate_code(self.before(), get_operator(self.operator)(), self.occurrence)

    def __str__(self) -> str:
        lines = list(difflib.unified_diff(self.before().splitlines(), self.after().splitlines(), n=0, lineterm=""))
        return "\n".join([f"{self.file}:{self.place[0]} {self.operator.removeprefix('core/')}", *lines[3:]])


class Control(Mutant):
    """None: with it every test passes, or what it would have killed counts for nothing."""

    def after(self) -> str:
        return self.before()


def unchanged(tree: ast.Module) -> Iterator[ast.AST | None]:
    """The nodes in which nothing is mutated."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            yield node
        elif isinstance(node, ast.Assert):
            yield node.msg
        elif isinstance(node, (ast.Subscript, ast.Call)):
            name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node.func)
            yield node if name == "Literal" or "warn" in name else None
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield node if node.name == "__repr__" else node.returns


def mutants(file: str) -> list[Mutant]:
    source = (ROOT / file).read_text()
    spans = [(start(node), end(node)) for node in unchanged(ast.parse(source)) if node]
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in filter(OPERATORS.fullmatch, operator_names()):
        places = [(place, node) for node in nodes for place, _ in get_operator(name)().mutation_positions(node)]
        # The bare * of a signature is no product.
        found += [Mutant(file, p, name, i) for i, (p, node) in enumerate(places) if node.parent.type != "parameters"]
    return [mutant for mutant in found if not any(low <= mutant.place < high for low, high in spans)]


def covering(mutant: Mutant, lines: dict[str, list[str]]) -> set[str]:
    """The tests that run the mutant's statement, or else what is around it."""
    statements = [node for node in ast.walk(ast.parse(mutant.before())) if isinstance(node, ast.stmt)]
    around = [node for node in reversed(statements) if start(node) <= mutant.place < end(node)]
    spans = [(start(node)[0], node.end_lineno) for node in around]
    if around and hasattr(around[0], "body") and not isinstance(around[0], (ast.FunctionDef, ast.ClassDef)):
        spans.insert(0, (around[0].lineno, max(mutant.place[0], around[0].body[0].lineno - 1)))
    for low, high in [*spans, (0, math.inf)]:
        if tests := {test for n, tests in lines.items() if low <= int(n) <= high for test in tests if test}:
            return tests
    return set()


def ordered(tests: set[str], cover: dict[str, Any], breadth: Counter[str], budget: float) -> list[str]:
    """The tests that run little else first, a second case of a test as if it ran twice as much, as the budget goes."""
    cases: Counter[str] = Counter()
    seconds, costs = cover["seconds"], {}
    for test in sorted(tests, key=lambda test: (breadth[test], test)):
        cases[test.partition("[")[0]] += 1
        costs[test] = breadth[test] * cases[test.partition("[")[0]]
    names = sorted((test for test in tests if seconds[test] < SLOW), key=lambda test: (costs[test], test))
    total = itertools.accumulate(seconds[name] for name in names)
    return [name for name, sum_so_far in zip(names, total) if sum_so_far <= budget]


def merged(old: dict[str, Any], new: dict[str, Any], files: list[str]) -> dict[str, Any]:
    """A recording with that of some test files in place of what it has of them."""

    def others(tests: Iterable[str]) -> list[str]:
        return [test for test in tests if test.partition("::")[0] not in files]

    lines = {file: {n: others(tests) for n, tests in each.items()} for file, each in old["lines"].items()}
    for file, each in new["lines"].items():
        for n, tests in each.items():
            known = lines.setdefault(file, {}).setdefault(n, [])
            known += [test for test in tests if test not in known]
    return {"lines": lines, "seconds": {test: old["seconds"][test] for test in others(old["seconds"])} | new["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=600, help="of each file in proportion to how many it has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a file, or a line of it as file:line")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests for one mutant")
    parser.add_argument("--cover", type=Path, help="keeps which test runs what, for the next time")
    parser.add_argument("--record", action="append", help="a test file that is new or changed since --cover was kept")
    parser.add_argument("--control", action="store_true", help="the same, but nothing is changed: all should live")
    options = parser.parse_args()
    files = sorted(str(path.relative_to(ROOT)) for part in PARTS for path in (ROOT / part).glob("*.py"))
    only = options.only or files
    groups = {file: [m for m in mutants(file) if file in only or f"{file}:{m.place[0]}" in only] for file in files}
    share = min(1.0, options.sample / sum(map(len, groups.values())))
    chosen: list[Mutant] = []
    for file, group in groups.items():
        chosen += sorted(random.Random(f"{options.seed} {file}").sample(group, round(share * len(group))))
    print(f"{sum(map(len, groups.values()))} mutants, {len(chosen)} of them tried", flush=True)

    torch.set_num_threads(1)
    torch.set_num_threads = lambda num: None  # A process with threads cannot be forked.
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    assert "lightning_dataflex" not in sys.modules
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.environ["PYTHONPATH"] = str(tree)
        path = options.cover or Path(folder, "cover.json")
        if not path.exists():
            recorded(tree, TESTS, path, [f"{part}/*" for part in PARTS])
        elif options.record:
            recorded(tree, options.record, Path(folder, "new.json"), [f"{part}/*" for part in PARTS])
            both = merged(*(json.loads(each.read_text()) for each in (path, Path(folder, "new.json"))), options.record)
            path.write_text(json.dumps(both))
        cover = json.loads(path.read_text())
        lines = defaultdict(dict, cover["lines"])
        breadth = Counter(test for each in lines.values() for tests in each.values() for test in tests)
        chosen = [Control(*each) for each in chosen] if options.control else chosen
        needs = {each: ordered(covering(each, lines[each.file]), cover, breadth, options.budget) for each in chosen}
        for mutant, status in tried(needs, tree, TESTS, cover):
            outcomes[mutant.file][{0: "lives", HANGS: "hangs"}.get(status, "killed")] += 1
            if bool(status) == options.control:
                print(f"\n{mutant}", flush=True)
    print("\n| file | killed | of | share |\n|---|--:|--:|--:|")
    for file, each in [*outcomes.items(), ("all", sum(outcomes.values(), Counter()))]:
        num, killed = each.total(), each.total() - each["lives"]
        print(f"| {file.removeprefix('lightning_dataflex/')} | {killed} | {num} | {killed / num:.0%} |")
    print(f"\n{sum(each['hangs'] for each in outcomes.values())} of the killed hang.")


if __name__ == "__main__":
    main()
