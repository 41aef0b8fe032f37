"""A mutant's tests in a forked child, which inherits what is imported; for `mutants.py`."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Protocol

import coverage
import pytest

HANGS, BROKEN, ANEW = 97, 98, 99
"""Exit statuses of a child: out of time; it raised; its mutant is in no function that is there."""
FEW = 20
"""Tests that are tried first where all of their files have to be imported anew."""


class Mutant(Protocol):
    """A change of one place of a file."""

    file: str
    place: tuple[int, int]

    def before(self) -> str: ...
    def after(self) -> str: ...


def start(node: Any) -> tuple[int, int]:
    return min((each.lineno, each.col_offset) for each in [node, *getattr(node, "decorator_list", [])])


def end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def exit_status(work: Callable[[], int], seconds: float = math.inf) -> int:
    """What `work` returns in a forked child."""
    if not (child := os.fork()):
        status = BROKEN
        try:
            os.setsid()
            status = int(work())
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):  # what it has started lives in its group
        os.killpg(child, signal.SIGKILL)
    if not ended[0]:
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended[1]) if ended[0] else HANGS


def pytest_in(tree: Path, arguments: list[str], plugin: object) -> Callable[[], int]:
    def work() -> int:
        log = os.open(tree.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2), os.chdir(tree), sys.path.insert(0, str(tree))
        return pytest.main(["-xq", "-p", "no:cacheprovider", "--disable-warnings", *arguments], plugins=[plugin])

    return work


class Recorder:
    """Writes which test runs which lines, and how long it takes."""

    def __init__(self, path: Path, include: list[str]) -> None:
        self.path, self.include, self.seconds, self.failed = path, include, {}, set()

    def pytest_sessionstart(self) -> None:
        self.coverage = coverage.Coverage(data_file=None, include=self.include, config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(item.nodeid)
        begin = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - begin
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {}
        for file in data.measured_files():
            found = data.contexts_by_lineno(file)
            lines[os.path.relpath(file)] = {n: [t for t in tests if t not in self.failed] for n, tests in found.items()}
        recording = {"seconds": self.seconds, "lines": lines, "failed": sorted(self.failed)}
        self.path.write_text(json.dumps(recording))


class Trials:
    """For each mutant runs the tests that it needs in a child, and notes the exit status."""

    def __init__(self, needs: dict[Mutant, list[str]], limit: Callable[[list[str]], float], notes: Path) -> None:
        self.needs, self.limit, self.notes = needs, limit, notes

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
        session.config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
        gc.freeze()
        for mutant, names in self.needs.items():

            def work(mutant: Mutant = mutant, names: list[str] = names) -> int:
                if not put_in_place(mutant, functions):
                    return ANEW
                chosen = [items[name] for name in names if name in items]
                for item, following in zip(chosen, [*chosen[1:], None]):
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                    if session.testsfailed:
                        return 1
                return 0

            with self.notes.open("a") as file:
                print(exit_status(work, self.limit(names)), file=file)
        return True


def put_in_place(mutant: Mutant, functions: list[FunctionType]) -> bool:
    """Whether the mutant is in the body or a default value of a function that is there."""
    source, path = mutant.after(), os.path.abspath(mutant.file)
    defined = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    node = next((each for each in defined if (each.lineno, each.col_offset) < mutant.place < end(each)), None)
    if node is None:
        return False

    def named(code: CodeType) -> bool:
        return (code.co_filename, code.co_name, code.co_firstlineno) == (path, node.name, start(node)[0])

    codes = [compile(source, path, "exec", dont_inherit=True)]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    alive = [function for function in functions if named(function.__code__)]
    for function in alive:
        (function.__code__,) = filter(named, codes)
        args, read = node.args, lambda default, names=function.__globals__: eval(ast.unparse(default), names)
        function.__defaults__ = tuple(map(read, args.defaults)) or None
        function.__kwdefaults__ = {a.arg: read(d) for a, d in zip(args.kwonlyargs, args.kw_defaults) if d} or None
    return bool(alive)


class Chosen:
    """Runs these tests alone, in this order."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self.names if name in found]


def imported_anew(mutant: Mutant, names: list[str], seconds: float, tree: Path) -> int:
    """Exit status of pytest on a tree with the mutant, a few tests first, which need few files."""
    target, status = tree / mutant.file, 0
    times = target.stat()
    target.write_text(mutant.after())
    try:
        for some in (names[:FEW], names[FEW:]):
            files = sorted({name.partition("::")[0] for name in some})
            status = status or (exit_status(pytest_in(tree, files, Chosen(some)), seconds) if some else 0)
            # Tests that are no more: nothing has failed.
            status = 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status
        return status
    finally:
        target.write_text(mutant.before())
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


def recorded(tree: Path, tests: list[str], path: Path, include: list[str]) -> None:
    """Write to a file which test runs which lines, and how long it takes; one that fails can tell nothing apart."""
    part = tree.parent / "recording.json"
    status = exit_status(pytest_in(tree, [*tests, "--maxfail=0"], Recorder(part, include)))
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit((tree.parent / "log").read_text())
    path.write_text(part.read_text())
    if failed := json.loads(path.read_text())["failed"]:
        print(f"Without the tests that fail anyway: {', '.join(failed)}", flush=True)


def tried(
    needs: dict[Mutant, list[str]], tree: Path, tests: list[str], cover: dict[str, Any]
) -> Iterator[tuple[Mutant, int]]:
    """Each mutant, and the exit status of the tests that it needs."""
    notes = tree.parent / "notes"

    def limit(names: list[str]) -> float:
        return 60 + 5 * sum(cover["seconds"][name] for name in names)

    if exit_status(pytest_in(tree, tests, Trials(needs, limit, notes))):
        sys.exit((tree.parent / "log").read_text())
    sys.dont_write_bytecode = True
    for (mutant, names), status in zip(needs.items(), map(int, notes.read_text().split())):
        at_import = "" in cover["lines"].get(mutant.file, {}).get(str(mutant.place[0]), [])
        # What has run when it was imported has run unchanged.
        if status == ANEW or (at_import and not status):
            status = imported_anew(mutant, names, limit(names), tree)
        if status == BROKEN:
            sys.exit(f"Could not be tried: {mutant}")
        yield mutant, status
