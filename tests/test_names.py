"""Names in a configuration run nothing, and no source of the package evaluates or unpickles."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_dataflex
from lightning_dataflex import DataFlexCallback, Pipeline, Selector, build
from lightning_dataflex.core.block import is_path
from lightning_dataflex.core.building import component
from lightning_dataflex.core.config import RefillConfig
from lightning_dataflex.mount import mount_of
from tests.hostile import not_ours
from tests.toy import Toy

PACKAGE = Path(lightning_dataflex.__file__).parent
CALLED: list[Any] = []


def records(*args: Any, **kwargs: Any) -> None:
    CALLED.append(args)


class NoComponent:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        CALLED.append(args)


HERE = "tests.test_names"


@pytest.mark.parametrize("kind", ["scorer", "selector", "reweighter", "mixer"])
@pytest.mark.parametrize(
    "name", ["os.system", "__import__('os')", "eval", "x\0y", "", "${HOME}", "../x", f"{HERE}.records", "a" * 10**5]
)
def test_a_name_is_looked_up_and_nothing_else(kind: Any, name: str) -> None:
    modules = set(sys.modules)
    for spec in (name, {"name": name}, {"name": name, "params": {"x": 1}}):
        with pytest.raises(ValueError, match=rf"There is no {kind} ") as caught:
            component(kind, spec)
        assert not not_ours(caught.value)
    assert not CALLED
    assert set(sys.modules) == modules


@pytest.mark.parametrize("kind", ["scorer", "selector", "reweighter", "mixer"])
@pytest.mark.parametrize(
    ("class_path", "message"),
    [
        ("os.system", "is no"),
        ("subprocess.Popen", "is no"),
        ("builtins.eval", "is no"),
        (f"{HERE}.records", "is no"),
        (f"{HERE}.NoComponent", "is no"),
        ("lightning_dataflex.Scorer", "is a base of components and none itself|is no"),
        ("lightning_dataflex.Selector", "is a base of components and none itself|is no"),
        ("lightning_dataflex.core.actuator.Actuator", "is no"),
        ("__import__('os').system", "cannot be imported: it is no path of names"),
        ("os;system", "cannot be imported: it is no path of names"),
        (".system", "cannot be imported: it is no path of names"),
        ("", "cannot be imported: it is no path of names"),
        ("x\0.y", "cannot be imported: it is no path of names"),
    ],
)
def test_a_class_path_of_anything_else_is_refused_and_never_called(kind: Any, class_path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        component(kind, {"class_path": class_path, "init_args": {"args": "echo"}})
    assert not not_ours(caught.value)
    assert not CALLED


def test_conditions_and_parts_are_looked_up_likewise() -> None:
    for kind, name, params in (
        ("selector", "all_of", {"selectors": [{"scorer": "os.system", "selector": "topk_fraction"}]}),
        ("selector", "not_", {"selector": {"class_path": f"{HERE}.records"}}),
        ("scorer", "rank", {"scorer": {"class_path": f"{HERE}.NoComponent"}}),
        ("scorer", "outcome", {"dist_sync_fn": f"{HERE}.records"}),
    ):
        with pytest.raises(ValueError, match=r"There is no scorer|is no (Selector|Scorer)|Give a function, in code"):
            build(kind, name, **params)
    assert not CALLED


class Noted(Selector):
    """Of an author: what its parameters hold is its own matter, and nothing is imported for it."""

    def __init__(self, maybe: dict[str, Any] | None = None, several: list[dict[str, Any]] | None = None) -> None:
        self.maybe, self.several = maybe, several

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        return []


@pytest.mark.parametrize("path", [f"{HERE}.NoComponent", "this.d"])
def test_nothing_is_imported_for_what_a_parameter_holds(path: str) -> None:
    given = {"inside": {"class_path": path, "init_args": {"args": 1}}}

    made = component("selector", {"class_path": f"{HERE}.Noted", "init_args": {"maybe": given, "several": [given]}})

    assert (made.maybe, made.several, CALLED) == (given, [given], [])
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "name", ["__class__", "__init__", "linear.__class__", "eval()", "", " ", "a..b", 3, ["x"], "a b"]
)
def test_a_mount_and_a_rollout_method_are_paths_of_names(name: Any) -> None:
    assert not is_path(name)
    for make in (
        lambda: DataFlexCallback("select", actuator="threshold_band", mount=name),
        lambda: RefillConfig(groups=3, rollout=name),
    ):
        with pytest.raises(ValueError, match=r"(mount|refill\.rollout) is .*\. Give ") as caught:
            make()
        assert not not_ours(caught.value)


def test_a_property_that_cannot_be_read_is_no_mount() -> None:
    with pytest.raises(
        ValueError, match=r"mount names 'trainer' of Toy, which cannot be read: .*Name the module"
    ) as caught:
        mount_of(Toy(), "trainer.fit")
    assert not not_ours(caught.value)


@pytest.mark.parametrize("key", ["advantages", "original_x", "", 3, "reward"])
def test_weights_are_written_over_nothing_else(key: Any) -> None:
    block = {"mechanism": "select", "actuator": "threshold_band", "fields": {"rm_scores": "reward"}}
    with pytest.raises(ValueError, match=r"weights_key is .*Give the name of a field that holds nothing but weights"):
        Pipeline.from_config(block | {"weights_key": key})


@pytest.mark.parametrize("label", ["", " ", 3, "a\nb", "\0", ["x"]])
def test_a_label_is_a_text_of_one_line(label: Any) -> None:
    with pytest.raises(ValueError, match=r"label is .*Give a text"):
        DataFlexCallback("select", actuator="threshold_band", label=label)
    assert DataFlexCallback("select", actuator="threshold_band", label="ünï/cødé 🜁").name == "ünï/cødé 🜁"


# -- the sources -------------------------------------------------------------------------------------------------------

FORBIDDEN = {"eval", "exec", "compile", "__import__", "system", "popen", "Popen"}
BETWEEN_RANKS = {"packing.py"}
"""What the ranks of one run send each other is pickled, as `torch.distributed` does: no file and no user gives it."""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_source_evaluates_or_unpickles(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name.split(".")[0] for alias in node.names} | {getattr(node, "module", None) or ""}
            assert not names & {"pickle", "marshal", "shelve", "dill", "subprocess"} or path.name in BETWEEN_RANKS
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            # module.eval() of PyTorch has no argument; re.compile and torch.compile make no code of texts.
            called = name in FORBIDDEN and (node.args or name != "eval") and owner not in ("re", "torch")
            assert not called, f"{name} in line {node.lineno}"
            if (owner, name) == ("torch", "load"):
                assert {k.arg: ast.literal_eval(k.value) for k in node.keywords}["weights_only"] is True
            assert owner != "yaml" or name in ("parse", "safe_load", "safe_dump"), f"yaml.{name} in line {node.lineno}"
