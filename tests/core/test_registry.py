"""Names to classes, parameters that are checked, and components that come from other packages."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch

from lightning_dataflex import (
    Scorer,
    Selector,
    build,
    components,
    register_mixer,
    register_reweighter,
    register_scorer,
    register_selector,
)
from lightning_dataflex.core import registry
from lightning_dataflex.core.registry import registered_name

SHIPPED = {
    "scorer": {"advantage_magnitude", "group_solve_rate", "reward_difficulty", "token_prob"},
    "selector": {"gfpo", "max_variance", "threshold_band", "topk_fraction"},
    "reweighter": {"advantage_reweight", "difficulty_band", "per_advantage", "softmax"},
}


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch):
    monkeypatch.setattr(registry, "_classes", {kind: dict(classes) for kind, classes in registry._classes.items()})
    monkeypatch.setattr(registry, "_loaded", set(registry._loaded))


class Handing(Scorer):
    """Hands what it does not know on to its base, as the tutorial teaches."""

    def __init__(self, threshold: float = 0.5, **kw):
        super().__init__(**kw)
        self.threshold = threshold

    def score(self, batch, step_id=0, **ctx):
        return batch["x"]


class Twice(Handing):
    def __init__(self, factor: int = 2, **kw):
        super().__init__(**kw)
        self.factor = factor


class Swallowing(Selector):
    """Swallows what it does not know."""

    def __init__(self, width: float, **kw):
        self.width = width

    def act(self, scores, batch, **ctx):
        return []


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_components_of_this_package_are_found(kind):
    found = components(kind)
    assert found.keys() >= SHIPPED[kind]
    assert list(found) == sorted(found)
    for name in SHIPPED[kind]:
        assert registered_name(build(kind, name)) == name


def test_a_registered_class_is_built_by_its_name():
    assert register_scorer("mine")(Handing) is Handing
    scorer = build("scorer", "mine", threshold=0.25)
    assert (type(scorer), scorer.threshold) == (Handing, 0.25)
    assert registered_name(scorer) == "mine"
    assert registered_name(Twice()) == "Twice"


@pytest.mark.parametrize(
    ("kind", "name", "nearest"),
    [
        ("scorer", "group_solverate", "Did you mean 'group_solve_rate'?"),
        ("selector", "treshold_band", "Did you mean 'threshold_band'?"),
        ("reweighter", "sofmax", "Did you mean 'softmax'?"),
        ("selector", "qqq", "no selector 'qqq'. Known: .*gfpo"),
        ("selektor", "gfpo", "Did you mean 'selector'?"),
        ("selector", "softmax", "no selector 'softmax'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(kind, name, nearest):
    with pytest.raises(ValueError, match=nearest.replace("?", r"\?")):
        build(kind, name)


PARAMETERS = [
    (kind, name, parameter.name)
    for kind, names in SHIPPED.items()
    for name in sorted(names)
    for parameter in inspect.signature(components(kind)[name]).parameters.values()
    if parameter.kind is not parameter.VAR_KEYWORD
]


@pytest.mark.parametrize(("kind", "name", "parameter"), PARAMETERS)
def test_every_parameter_misspelt_is_answered_with_the_right_one(kind, name, parameter):
    with pytest.raises(ValueError, match=rf"'{name}' has no parameter '{parameter}_'\. Did you mean '{parameter}'\?"):
        build(kind, name, **{parameter + "_": 1})


def test_components_that_take_any_keyword_refuse_a_misspelt_one_too():
    register_scorer("twice")(Twice)
    register_selector("swallowing")(Swallowing)
    scorer = build("scorer", "twice", factor=3, threshold=0.1)
    assert (scorer.factor, scorer.threshold) == (3, 0.1)
    with pytest.raises(
        ValueError, match=r"no parameter 'treshold'\. Did you mean 'threshold'\? Known: factor, threshold"
    ):
        build("scorer", "twice", treshold=0.1)
    with pytest.raises(ValueError, match=r"no parameter 'widht'\. Did you mean 'width'"):
        build("selector", "swallowing", widht=1.0)
    with pytest.raises(ValueError, match="'swallowing' needs width"):
        build("selector", "swallowing")


@pytest.mark.parametrize(
    ("kind", "name", "parameter", "value", "expected"),
    [
        ("selector", "threshold_band", "low", "abc", "float"),
        ("selector", "threshold_band", "closed", 3, "bool"),
        ("selector", "gfpo", "k", 2.5, "int"),
        ("selector", "gfpo", "metric", "shrt", "Literal.*short"),
        ("selector", "topk_fraction", "fraction", [0.5], "float"),
        ("scorer", "advantage_magnitude", "agg", "median", "Literal.*mean"),
        ("reweighter", "softmax", "temperature", None, "float"),
    ],
)
def test_a_parameter_of_another_type_is_refused_with_the_type(kind, name, parameter, value, expected):
    with pytest.raises(ValueError, match=rf"{parameter} of the {kind} '{name}' is .*must be of type {expected}"):
        build(kind, name, **{parameter: value})


def test_a_whole_number_is_a_float():
    low = build("selector", "threshold_band", low=0, high=1).low
    assert (low, type(low)) == (0.0, float)


def test_annotations_that_cannot_be_resolved_are_left_unchecked():
    class Loose(Selector):
        def __init__(self, path: NotImported = None, num: Any = 0):  # noqa: F821
            self.path, self.num = path, num

        def act(self, scores, batch, **ctx):
            return []

    register_selector("loose")(Loose)
    loose = build("selector", "loose", path="here", num="many")
    assert (loose.path, loose.num) == ("here", "many")


def test_a_class_of_another_kind_and_a_taken_name_are_refused():
    for register in (register_selector, register_reweighter, register_mixer):
        with pytest.raises(TypeError, match=r"Handing.* is no (Selector|Reweighter|Mixer)"):
            register("mine")(Handing)
    with pytest.raises(ValueError, match=r"'softmax' is registered already, by .*Softmax"):
        register_reweighter("softmax")(components("reweighter")["per_advantage"])


def test_a_notebook_cell_may_run_twice():
    for factor in (2, 3):

        class Cell(Selector):
            times = factor

            def act(self, scores, batch, **ctx):
                return []

        register_selector("cell")(Cell)
    assert build("selector", "cell").times == 3


PLUGIN = """
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.core.actuator import Selector

@register_selector("every_other")
class EveryOther(Selector):
    def __init__(self, start: int = 0, **kw):
        super().__init__(**kw)
        self.start = start

    def act(self, scores, batch, **ctx):
        return list(range(self.start, len(scores), 2))
"""


def install(path, module: str, source: str) -> None:
    (path / f"{module}.py").write_text(source)
    info = path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lightning_dataflex.components]\nrules = {module}\n")


def test_an_installed_package_registers_through_its_entry_point(tmp_path, monkeypatch):
    install(tmp_path, "dataflex_test_plugin", PLUGIN)
    assert "every_other" not in components("selector")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    try:
        selector = build("selector", "every_other", start=1)
        assert selector.act(torch.zeros(5), {}) == [1, 3]
        assert type(selector).__module__ == "dataflex_test_plugin"
        with pytest.raises(ValueError, match="Did you mean 'every_other'"):
            build("selector", "every_othr")
    finally:
        sys.modules.pop("dataflex_test_plugin", None)


def test_an_installed_package_that_does_not_import_is_named(tmp_path, monkeypatch):
    install(tmp_path, "dataflex_broken_plugin", "raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match=r"components of dataflex_broken_plugin, which fails to import: no licence\."):
        components("selector")


@pytest.mark.parametrize("name", ["my.rule", "rule(1)", "", "two words"])
def test_a_name_that_a_checkpoint_could_not_hold_is_refused(name):
    with pytest.raises(ValueError, match=r"The scorer is to be called .* Use letters, digits, underscores and hyphens"):
        register_scorer(name)(type("Named", (Scorer,), {"score": lambda self, batch, step_id, **ctx: None}))
