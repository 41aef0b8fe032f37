"""Names to component classes, and classes to components."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args, get_origin

from jsonargparse import ArgumentParser

from lightning_dataflex.core.actuator import Reweighter, Selector
from lightning_dataflex.core.checks import check_nesting
from lightning_dataflex.core.mixer import Mixer
from lightning_dataflex.core.scorer import METRIC_OPTIONS, Scorer
from lightning_dataflex.functional.choices import shown

Kind = Literal["scorer", "selector", "reweighter", "mixer"]
Class = TypeVar("Class", bound=type)

BASES: dict[str, type] = {"scorer": Scorer, "selector": Selector, "reweighter": Reweighter, "mixer": Mixer}
ENTRY_POINTS = "lightning_dataflex.components"
"""The entry-point group through which another package registers: each entry names a module to import."""

NEVER_MEANT = (bytes, bytearray, memoryview)
"""Types of no parameter, which would be read as lists of numbers."""

_classes: dict[str, dict[str, type]] = {kind: {} for kind in BASES}
_loaded: set[str] = set()


def register_scorer(name: str) -> Callable[[Class], Class]:
    """Class decorator: the Scorer is found under this name."""
    return _register("scorer", name)


def register_selector(name: str) -> Callable[[Class], Class]:
    """Class decorator: the Selector is found under this name."""
    return _register("selector", name)


def register_reweighter(name: str) -> Callable[[Class], Class]:
    """Class decorator: the Reweighter is found under this name."""
    return _register("reweighter", name)


def register_mixer(name: str) -> Callable[[Class], Class]:
    """Class decorator: the Mixer is found under this name."""
    return _register("mixer", name)


def _register(kind: str, name: str) -> Callable[[Class], Class]:
    def register(cls: Class) -> Class:
        if not (isinstance(cls, type) and issubclass(cls, BASES[kind])):
            raise TypeError(f"{cls!r} is no {BASES[kind].__name__}. Derive it from {BASES[kind].__name__}.")
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"The {kind} is to be called {shown(name)}. Use letters, digits, underscores and hyphens.")
        there = _classes[kind].get(name)
        # The same class again is a module that was reloaded, or a notebook cell that was run twice.
        if there is not None and (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"The {kind} {name!r} is registered already, by {there.__module__}.{there.__qualname__}. "
                "Choose another name."
            )
        _classes[kind][name] = cls
        return cls

    return register


def components(kind: Kind) -> dict[str, type]:
    """All registered classes of a kind by name, those of installed packages included.

    Example:
        >>> components("selector")["threshold_band"]
        <class 'lightning_dataflex.selectors.bands.ThresholdBand'>
    """
    if kind not in list(BASES):
        raise ValueError(f"There is no kind of component {shown(kind)}. {nearest(kind, BASES)}")
    _load_packages()
    return dict(sorted(_classes[kind].items()))


def _load_packages() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.value in _loaded:
            continue
        try:
            entry.load()
        except Exception as error:
            raise ImportError(
                f"The entry point {entry.name!r} registers components of {entry.value}, which fails to import: "
                f"{str(error).rstrip('.')}. Mend or uninstall the package that declares it."
            ) from error
        _loaded.add(entry.value)


def registered_name(component: object) -> str:
    """The name that a component's class is registered under, or the class's own name."""
    for classes in _classes.values():
        for name, cls in classes.items():
            if type(component) is cls:
                return name
    return type(component).__name__


def settings_of(component: object) -> dict[str, Any]:
    """What a component was built with, as far as it keeps it; not what its class says of every such component."""
    base = next(base for base in BASES.values() if isinstance(component, base))
    return {key: value for key, value in vars(component).items() if key[0] != "_" and not hasattr(base, key)}


def lookup(kind: Kind, name: str) -> type:
    """The class registered under a name; a ValueError names the nearest."""
    # To look through what is installed takes longer than to build a component.
    if isinstance(name, str) and name in _classes.get(kind, {}):
        return _classes[kind][name]
    known = components(kind)
    if not isinstance(name, str) or name not in known:
        other = [each for each in BASES if each != kind and name in list(_classes[each])]
        hint = f"It is a {other[0]}. " if other else ""
        raise ValueError(
            f"There is no {kind} {shown(name)}. {hint}{nearest(name, known)} "
            "One of your own must be imported first: give its class_path."
        )
    return known[name]


def build(kind: Kind, name: str, **params: Any) -> Any:
    """A component by its registered name, for use without a Trainer.

    Args:
        kind: `scorer`, `selector`, `reweighter` or `mixer`.
        name: As registered.
        params: Of its `__init__`. A parameter that it does not have, or of another type, is a ValueError.

    Example:
        >>> import torch
        >>> scorer = build("scorer", "group_solve_rate", success_threshold=0.5)
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 1.0]), "uid": ["a", "a", "b"]}
        >>> scores = scorer.score(batch, step_id=0); scores
        tensor([0.5000, 0.5000, 1.0000])
        >>> build("selector", "threshold_band", low=0.2, high=0.8).act(scores, batch)
        [0, 1]
    """
    return construct(lookup(kind, name), params, f"{kind} {name!r}")


def construct(cls: type, params: Mapping[str, Any], title: str, offered: Mapping[str, Any] | None = None) -> Any:
    """`cls(**params)` after a check of the names and types of the parameters.

    Args:
        cls: The class.
        params: Arguments that it must have.
        title: What the component is called in an error.
        offered: Arguments that it gets if it has them and they are not among the others.
    """
    if inspect.isabstract(cls):
        raise ValueError(f"The {title} is a base of components and none itself. Give a class that derives from it.")
    known = init_parameters(cls)
    params = {name: value for name, value in (offered or {}).items() if name in known} | dict(params)
    for name in params:
        if name not in known:
            own = [parameter for parameter in known if parameter not in METRIC_OPTIONS]
            raise ValueError(f"The {title} has no parameter {shown(name)}. {nearest(name, own)}")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in params]
    if missing:
        raise ValueError(f"The {title} needs {', '.join(missing)}. Give it under params.")
    for name, value in params.items():
        check_nesting(f"{name} of the {title}", value)
    component = cls(**{name: _typed(known[name], value, title) for name, value in params.items()})
    if isinstance(component, Scorer) and "_defaults" not in vars(component):
        raise ValueError(f"The {title} is no Metric yet: its __init__ must call super().__init__(**kwargs).")
    return component


def init_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Named parameters of `__init__`, those included that it hands on to its bases through `**kwargs`."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = _signature(base.__init__).parameters.values()  # type: ignore[misc]
        kinds = {p.kind for p in parameters}
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                found.setdefault(p.name, p)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
        if base is Scorer:
            # Metric declares its options in its documentation alone.
            found |= {
                name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
                for name, kind in METRIC_OPTIONS.items()
            }
            break
    return found


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # annotations that exist for the type checker alone
        return inspect.signature(function)


def _has_any(annotation: Any) -> bool:
    return annotation is Any or any(_has_any(each) for each in get_args(annotation))


def _names_a_class(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "class_path" in value or any(map(_names_a_class, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_names_a_class, value))


def _typed(parameter: inspect.Parameter, value: Any, title: str) -> Any:
    if parameter.annotation is parameter.empty or isinstance(parameter.annotation, str):
        return value
    if parameter.annotation is Callable:
        # jsonargparse would import a function by its name.
        if value is not None and not callable(value):
            raise ValueError(f"{parameter.name} of the {title} is {shown(value)}. Give a function, in code.")
        return value
    if Any in (parameter.annotation, *get_args(parameter.annotation)):
        # What is built from it is checked there; jsonargparse would build what has a class_path itself.
        kind = get_origin(parameter.annotation)
        if kind is None or isinstance(value, kind):
            return value
    if _has_any(parameter.annotation) and _names_a_class(value):
        return value
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{parameter.name}", type=parameter.annotation)
    try:
        if isinstance(value, NEVER_MEANT) or (value is None and type(None) not in get_args(parameter.annotation)):
            raise TypeError("jsonargparse takes it for something else")
        return parser.parse_object({parameter.name: _unshared(value)})[parameter.name]
    except Exception as error:  # that of jsonargparse, or of the value itself when it is looked at
        expected = inspect.formatannotation(parameter.annotation)
        raise ValueError(
            f"{parameter.name} of the {title} is {shown(value)}. It must be of type {expected}."
        ) from error


def _unshared(value: Any) -> Any:
    """The value in lists and dicts of its own: jsonargparse converts what they hold in place."""
    if type(value) is dict:
        return {key: _unshared(each) for key, each in value.items()}
    return [_unshared(each) for each in value] if type(value) is list else value


def nearest(name: object, known: Iterable[str]) -> str:
    """A sentence that names what the user may have meant.

    Example:
        >>> nearest("hgh", ["low", "high"])
        "Did you mean 'high'? Known: low, high."
    """
    known = [str(k) for k in known]
    close = difflib.get_close_matches(name[:100], known, 1, cutoff=0.5) if isinstance(name, str) else []
    return (f"Did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known) or 'none'}."
