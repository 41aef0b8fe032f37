"""The share of small faults in `functional/` and `core/` that the tests notice.

    python benchmarks/mutants.py --sample 600 --seed 0 [--only lightning_dataflex/functional/loss.py]

Needs the extra `mutants`. cosmic-ray changes one operator, number, keyword, loop, handler or decorator at a time. The
tests that cover the changed statement run in a forked child, one case of each test first, quick ones before slow ones,
up to the first that fails. The child inherits imported modules and puts the changed function into place; where the
change is outside of functions it imports all anew. Prints the mutants that live, and a table.

Not changed: annotations, texts (docstrings, f-strings, what is raised or warned) and `__repr__`. Not run: tests that
start processes, and what goes beyond `--budget` seconds of tests for one mutant. A mutant that hangs counts as killed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import coverage
import hypothesis
import jsonargparse
import lightning.pytorch
import pytest
import tensordict
import torch
import torchmetrics
import transformers
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

PRELOADED = (jsonargparse, lightning.pytorch, tensordict, torchmetrics, transformers)
ROOT = Path(__file__).resolve().parent.parent
PARTS = ("lightning_dataflex/functional", "lightning_dataflex/core")
PROCESSES = ("cli", "configs", "docs", "epochs", "gpu", "ranks", "ranks_types", "rows", "strategies")
TESTS = ["tests", "lightning_dataflex", "--ignore=tests/examples", *(f"--ignore=tests/test_{n}.py" for n in PROCESSES)]
ANEW = 99
"""Exit status of a child that cannot put its mutant in place."""
WAVE = 40
"""So many tests run before the files of all others are imported."""
SLOW = 3.0
"""Seconds from which on a test is not run."""
REPLACED = [
    "Add_Sub",
    "Sub_Add",
    "Mul_Div",
    "Div_Mul",
    "FloorDiv_Div",
    "Mod_FloorDiv",
    "Pow_Mul",
    "BitOr_BitAnd",
    "BitAnd_BitOr",
]
COMPARED = [
    "Eq_NotEq",
    "NotEq_Eq",
    "Lt_LtE",
    "Lt_Gt",
    "LtE_Lt",
    "LtE_GtE",
    "Gt_GtE",
    "Gt_Lt",
    "GtE_Gt",
    "GtE_LtE",
    "Is_IsNot",
    "IsNot_Is",
]
OPERATORS = [
    *(f"ReplaceBinaryOperator_{name}" for name in REPLACED),
    *(f"ReplaceComparisonOperator_{name}" for name in COMPARED),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    *("RemoveDecorator", "ZeroIterationForLoop"),
]
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
        return mutate_code(self.before(), get_operator(f"core/{self.operator}")(), self.occurrence)

    def __str__(self) -> str:
        lines = list(difflib.unified_diff(self.before().splitlines(), self.after().splitlines(), n=0, lineterm=""))
        return "\n".join([f"{self.file}:{self.place[0]} {self.operator}", *lines[3:]])


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
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = [(place, node) for node in nodes for place, _ in operator.mutation_positions(node)]
        # The bare * of a signature is no product.
        found += [Mutant(file, p, name, i) for i, (p, n) in enumerate(places) if n.parent.type != "parameters"]
    return [mutant for mutant in found if not any(low <= mutant.place < high for low, high in spans)]


def start(node: Any) -> tuple[int, int]:
    return min((each.lineno, each.col_offset) for each in [node, *getattr(node, "decorator_list", [])])


def end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def sampled(groups: dict[str, list[Mutant]], num: int, seed: int) -> list[Mutant]:
    """About `num` of all mutants, at random, each file's in proportion to how many it has."""
    share = min(1.0, num / sum(map(len, groups.values())))
    draws = [random.Random(f"{seed} {file}").sample(group, round(share * len(group))) for file, group in groups.items()]
    return [mutant for draw in draws for mutant in sorted(draw)]


def exit_status(work: Callable[[], int], seconds: float) -> int:
    """What `work` returns in a forked child; -9 where it runs out of time."""
    if not (child := os.fork()):
        status = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
            status = int(work())
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(done[1])


def pytest_in(tree: Path, arguments: list[str], plugin: object) -> Callable[[], int]:
    def work() -> int:
        log = os.open(tree.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2), os.chdir(tree), sys.path.insert(0, str(tree))
        return pytest.main(["-xq", "-p", "no:cacheprovider", "--disable-warnings", *arguments], plugins=[plugin])

    return work


class Recorder:
    """Writes which test runs which lines, and how long it takes."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, {}

    def pytest_sessionstart(self) -> None:
        self.coverage = coverage.Coverage(data_file=None, include=[f"{part}/*" for part in PARTS], config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(item.nodeid)
        begin = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - begin
        return result

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {os.path.relpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}
        self.path.write_text(json.dumps({"seconds": self.seconds, "lines": lines}))


class Chosen:
    """Runs these tests alone, in this order."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self.names if name in found]


class Trials:
    """For each mutant runs the tests that it needs in a child, and notes the exit status."""

    def __init__(self, needs: dict[Mutant, list[str]], seconds: dict[str, float], notes: Path) -> None:
        self.needs, self.seconds, self.notes = needs, seconds, notes

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = live_functions()
        session.config.get_terminal_writer()._file = open(os.devnull, "w")
        gc.freeze()
        for mutant, names in self.needs.items():

            def work(mutant: Mutant = mutant, names: list[str] = names) -> int:
                if not put_in_place(mutant, functions):
                    return ANEW
                chosen = [items[name] for name in names]
                for item, following in zip(chosen, [*chosen[1:], None]):
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                    if session.testsfailed:
                        return 1
                return 0

            status = exit_status(work, limit(names, self.seconds))
            with self.notes.open("a") as file:
                print(json.dumps([mutant, status]), file=file)
        return True


def live_functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    found = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(os.getcwd()):
            code = each.__code__
            found[os.path.relpath(code.co_filename), code.co_name, code.co_firstlineno].append(each)
    return found


def outermost(place: tuple[int, int], tree: ast.Module) -> ast.FunctionDef | None:
    """The function whose body or default values are there."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return next((node for node in functions if (node.lineno, node.col_offset) < place < end(node)), None)


def put_in_place(mutant: Mutant, functions: dict[tuple[str, str, int], list[FunctionType]]) -> bool:
    """Whether the mutant is in functions that are there."""
    source = mutant.after()
    if not (node := outermost(mutant.place, ast.parse(source))):
        return False
    alive = functions.get((mutant.file, node.name, start(node)[0]), [])
    codes = [compile(source, os.path.abspath(mutant.file), "exec", dont_inherit=True)]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    for function in alive:
        (function.__code__,) = (c for c in codes if (c.co_name, c.co_firstlineno) == (node.name, start(node)[0]))
        args = node.args
        values = [default and eval(ast.unparse(default), function.__globals__) for default in args.defaults]
        function.__defaults__ = tuple(values) or None
        named = {each.arg: default for each, default in zip(args.kwonlyargs, args.kw_defaults) if default}
        values = {name: eval(ast.unparse(default), function.__globals__) for name, default in named.items()}
        function.__kwdefaults__ = values or None
    return bool(alive)


def imported_anew(mutant: Mutant, names: list[str], seconds: dict[str, float], tree: Path) -> int:
    """Exit status of pytest on a tree with the mutant."""
    target = tree / mutant.file
    times = target.stat()
    target.write_text(mutant.after())
    try:
        for wave in (names[:WAVE], names[WAVE:]):
            files = sorted({name.partition("::")[0] for name in wave})
            if wave and (status := exit_status(pytest_in(tree, files, Chosen(wave)), limit(wave, seconds))):
                return status
        return 0
    finally:
        target.write_text(mutant.before())
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


def limit(names: list[str], seconds: dict[str, float]) -> float:
    return 60 + 5 * sum(seconds[name] for name in names)


def covering(mutant: Mutant, lines: dict[str, list[str]]) -> set[str]:
    """The tests that run the mutant's statement, or else what is around it."""
    around = [n for n in ast.walk(ast.parse(mutant.before())) if isinstance(n, ast.stmt)]
    around = [n for n in around if start(n) <= mutant.place < end(n)]
    spans = sorted([(start(n)[0], n.end_lineno) for n in around], key=lambda span: span[1] - span[0])
    for node in around[-1:]:  # of a compound statement its head alone
        if hasattr(node, "body") and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            spans.insert(0, (node.lineno, max(mutant.place[0], node.body[0].lineno - 1)))
    for low, high in [*spans, (0, math.inf)]:
        if tests := {test for n, tests in lines.items() if low <= int(n) <= high for test in tests if test}:
            return tests
    return set()


def ordered(tests: set[str], seconds: dict[str, float], budget: float) -> list[str]:
    """The quick tests first, a second case of a test as if it took twice as long, as far as the budget goes."""
    cases: Counter[str] = Counter()
    costs = {}
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        cases[test.partition("[")[0]] += 1
        costs[test] = seconds[test] * cases[test.partition("[")[0]]
    names = sorted((test for test in tests if seconds[test] < SLOW), key=lambda test: (costs[test], test))
    total = itertools.accumulate(seconds[name] for name in names)
    return [name for name, sum_so_far in zip(names, total) if sum_so_far <= budget]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a file, or a line of it as file:line")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests for one mutant")
    parser.add_argument("--cover", type=Path, help="keeps which test runs what, for the next time")
    parser.add_argument("--notes", type=Path, help="keeps the exit status of each mutant")
    options = parser.parse_args()
    files = sorted(str(path.relative_to(ROOT)) for part in PARTS for path in (ROOT / part).glob("*.py"))
    only = options.only or files
    groups = {file: [m for m in mutants(file) if file in only or f"{file}:{m.place[0]}" in only] for file in files}
    chosen = sampled(groups, options.sample, options.seed)
    print(f"{sum(map(len, groups.values()))} mutants, {len(chosen)} of them tried", flush=True)

    torch.set_num_threads(1)
    torch.set_num_threads = lambda num: None  # A process with threads cannot be forked.
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    assert "lightning_dataflex" not in sys.modules
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.environ["PYTHONPATH"] = str(tree)
        path, notes = options.cover or Path(folder, "cover.json"), options.notes or Path(folder, "notes")
        if not path.exists() and exit_status(pytest_in(tree, TESTS, Recorder(path)), math.inf):
            sys.exit(Path(folder, "log").read_text())
        cover = json.loads(path.read_text())
        seconds = cover["seconds"]
        needs = {m: ordered(covering(m, cover["lines"].get(m.file, {})), seconds, options.budget) for m in chosen}
        if exit_status(pytest_in(tree, TESTS, Trials(needs, seconds, notes)), math.inf):
            sys.exit(Path(folder, "log").read_text())
        sys.dont_write_bytecode = True
        outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        for (mutant, names), line in zip(needs.items(), notes.read_text().splitlines()):
            status = json.loads(line)[1]
            # A child that lives with a line of the import has not run it.
            if status == ANEW or (not status and "" in cover["lines"][mutant.file].get(str(mutant.place[0]), [])):
                status = imported_anew(mutant, names, seconds, tree)
            outcomes[mutant.file][{0: "lives", -signal.SIGKILL: "hangs"}.get(status, "killed")] += 1
            if not status:
                print(f"\n{mutant}", flush=True)
    report(outcomes)


def report(outcomes: dict[str, Counter[str]]) -> None:
    print("\n| file | killed | of | share |\n|---|--:|--:|--:|")
    total = sum(outcomes.values(), Counter())
    for file, each in [*outcomes.items(), ("all", total)]:
        num = sum(each.values())
        killed = num - each["lives"]
        print(f"| {file.removeprefix('lightning_dataflex/')} | {killed} | {num} | {killed / num:.0%} |")
    print(f"\n{total['hangs']} of the killed hang.")


if __name__ == "__main__":
    main()
