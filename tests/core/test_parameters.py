"""Parameters of components: which a class has, of which types, and how it is built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch

from lightning_dataflex import Mixer, Reweighter, Scorer, Selector, build
from lightning_dataflex.core import registry
from lightning_dataflex.core.registry import (
    BASES,
    components,
    construct,
    init_parameters,
    lookup,
    nearest,
    register_mixer,
    register_selector,
    registered_name,
    settings_of,
)
from lightning_dataflex.core.scorer import METRIC_OPTIONS


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_classes", {kind: dict(classes) for kind, classes in registry._classes.items()})


class Rule(Selector):
    def __init__(
        self,
        num: int = 1,
        *,
        share: float = 0.5,
        closed: bool = False,
        mode: Literal["a", "b"] = "a",
        function: Callable = None,  # noqa: RUF013
        names: list[str] | None = None,
        extra: dict[str, Any] | None = None,
        parts: list[Any] = (),
        anything: Any = 0,
        untyped=0,
    ) -> None:
        self.settings = {name: value for name, value in locals().items() if name != "self"}

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        return []


class Passing(Rule):
    def __init__(self, top: int = 3, num: str = "x", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.top, self.given = top, num


class Closed(Passing):
    def __init__(self, *args: Any, own: int = 1) -> None:
        super().__init__()


OWN = ["num", "share", "closed", "mode", "function", "names", "extra", "parts", "anything", "untyped"]


def built(**params: Any) -> dict[str, Any]:
    return construct(Rule, params, "selector 'rule'").settings


def test_parameters_are_those_of_a_class_and_of_what_it_hands_on_to() -> None:
    assert list(init_parameters(Rule)) == OWN
    assert list(init_parameters(Passing)) == ["top", *OWN] or list(init_parameters(Passing))[:2] == ["top", "num"]
    assert set(init_parameters(Passing)) == {"top", *OWN}
    assert init_parameters(Passing)["num"].annotation is str
    assert list(init_parameters(Closed)) == ["own"]

    class Measure(Scorer):
        def __init__(self, a: int = 0, **kw: Any) -> None:
            super().__init__(**kw)

        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
            return None

    assert list(init_parameters(Measure)) == ["a", *METRIC_OPTIONS]
    assert {p.kind.name for p in init_parameters(Measure).values()} == {"POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"}
    assert init_parameters(Measure)["sync_on_compute"].default is None


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("num", 3, 3),
        ("share", 1, 1.0),
        ("closed", True, True),
        ("mode", "b", "b"),
        ("function", len, len),
        ("function", None, None),
        ("names", None, None),
        ("names", ["a"], ["a"]),
        ("extra", {"a": {"b": 1}}, {"a": {"b": 1}}),
        ("parts", [{"class_path": "os.system"}, 3], [{"class_path": "os.system"}, 3]),
        ("anything", {"class_path": "os.system"}, {"class_path": "os.system"}),
        ("anything", b"x", b"x"),
        ("untyped", object, object),
    ],
)
def test_values_of_a_parameters_type(name: str, given: Any, expected: Any) -> None:
    value = built(**{name: given})[name]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("num", 1.5, "must be of type int"),
        ("num", None, "must be of type int"),
        ("mode", "c", "must be of type .*Literal"),
        ("function", "os.system", "Give a function, in code"),
        ("names", 3, "must be of type list"),
        ("names", b"ab", "must be of type list"),
        ("names", bytearray(b"ab"), "must be of type list"),
        ("names", memoryview(b"ab"), "must be of type list"),
        ("parts", "ab", "must be of type list"),
    ],
)
def test_values_of_another_type(name: str, given: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} of the selector 'rule' is .*{expected}"):
        built(**{name: given})


def test_lists_of_a_configuration_stay_as_they_are() -> None:
    names: list[Any] = ["1", "2"]
    assert built(names=names)["names"] == ["1", "2"]
    nested = {"a": [{"b": 1}]}
    assert built(extra=nested)["extra"] == {"a": [{"b": 1}]}
    assert (names, nested) == (["1", "2"], {"a": [{"b": 1}]})


def test_what_is_offered_is_taken_where_it_is_known_and_not_given() -> None:
    component = construct(Rule, {"num": 5}, "x", {"num": 7, "share": 0.25, "other": 1})
    assert (component.settings["num"], component.settings["share"]) == (5, 0.25)


def test_what_a_component_needs_is_asked_for() -> None:
    class Needs(Selector):
        def __init__(self, low: float, high: float, mid: float = 0.5) -> None:
            self.low = low

        def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
            return []

    assert construct(Needs, {"low": 1, "high": 2}, "x").low == 1
    with pytest.raises(ValueError, match=r"^The x needs low, high\. Give it under params"):
        construct(Needs, {"mid": 1}, "x")
    with pytest.raises(ValueError, match=r"^The x needs high\."):
        construct(Needs, {}, "x", {"low": 3})
    with pytest.raises(ValueError, match=r"^The x has no parameter 'lo'\. Did you mean 'low'\? Known: low, high, mid"):
        construct(Needs, {"low": 1, "lo": 1}, "x")
    for base in BASES.values():
        with pytest.raises(ValueError, match=r"^The x is a base of components and none itself"):
            construct(base, {}, "x")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"^parts of the x is nested more than 32 deep"):
        construct(Rule, {"parts": loop}, "x")


def test_a_scorer_that_is_no_metric_yet_is_told_of() -> None:
    class Forgets(Scorer):
        def __init__(self) -> None:
            pass

        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
            return None

    with pytest.raises(ValueError, match=r"^The x is no Metric yet: its __init__ must call super\(\)"):
        construct(Forgets, {}, "x")


def test_names_are_found_and_kinds_told_apart() -> None:
    assert register_selector("a-rule_1")(Rule) is Rule
    assert lookup("selector", "a-rule_1") is Rule
    assert (registered_name(Rule()), registered_name(Passing())) == ("a-rule_1", "Passing")
    assert list(components("selector")) == sorted(components("selector"))
    with pytest.raises(ValueError, match=r"^There is no scorer 'a-rule_1'\. It is a selector\. "):
        lookup("scorer", "a-rule_1")
    with pytest.raises(ValueError, match=r"^There is no selector 'a-rule'\. Did you mean 'a-rule_1'\? Known: "):
        lookup("selector", "a-rule")
    with pytest.raises(ValueError, match=r"^There is no selector 3\. Known: .*: give its class_path"):
        lookup("selector", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^There is no kind of component 'selectr'\. Did you mean 'selector'"):
        components("selectr")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^The selector 'a-rule_1' is registered already, by .*Rule"):
        register_selector("a-rule_1")(Passing)
    for wrong in (Rule, Rule(), len):
        with pytest.raises(TypeError, match=r"is no Mixer. Derive it from Mixer"):
            register_mixer("mine")(wrong)  # type: ignore[type-var]
    assert {"scorer": Scorer, "selector": Selector, "reweighter": Reweighter, "mixer": Mixer} == BASES


def test_packages_are_loaded_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    class Entry:
        def __init__(self, value: str) -> None:
            self.name = self.value = value

        def load(self) -> None:
            loaded.append(self.value)

    monkeypatch.setattr(registry, "_loaded", {"first"})
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry("first"), Entry("second"), Entry("third")])
    for _ in range(2):
        components("selector")
    assert loaded == ["second", "third"]


def test_settings_are_what_a_component_was_built_with() -> None:
    band = build("selector", "threshold_band", low=0.1, high=0.9)
    assert settings_of(band) == {"low": 0.1, "high": 0.9, "closed": False}
    band._hidden, band.granularities = 3, ("token",)
    assert settings_of(band) == {"low": 0.1, "high": 0.9, "closed": False}


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("hgh", ["low", "high"], "Did you mean 'high'? Known: low, high."),
        ("zzz", ["low", "high"], "Known: low, high."),
        (3, ["low"], "Known: low."),
        ("x", [], "Known: none."),
        ("abxx", ["abcd"], "Did you mean 'abcd'? Known: abcd."),
        ("axxx", ["abcd"], "Known: abcd."),
        ("a" * 150, ["a" * 100], f"Did you mean '{'a' * 100}'? Known: {'a' * 100}."),
    ],
)
def test_the_nearest_name(name: Any, known: Sequence[str], expected: str) -> None:
    assert nearest(name, known) == expected


def test_values_that_a_mapping_holds_are_looked_at() -> None:
    assert isinstance(built(extra={"t": torch.ones(1)})["extra"], Mapping)
