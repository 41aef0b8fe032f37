"""A component from what a configuration says of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dataflex.core.registry import BASES, Kind, construct, lookup, nearest
from lightning_dataflex.functional.choices import shown


@dataclass
class ComponentConfig:
    """A component by its registered name.

    Args:
        name: As registered; `dataflex components` lists them.
        params: Parameters of its `__init__`.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)


def component(kind: Kind, spec: Any, **offered: Any) -> Any:
    """A component from a name, `{name, params}`, `{class_path, init_args}`, or itself.

    Args:
        kind: scorer, selector, reweighter or mixer.
        spec: What to build. A name is looked up among those registered, and nothing else; a class_path is imported,
            and refused unless it is a class of this kind.
        offered: Arguments for a class that takes them and is not given them.

    Example:
        >>> component("selector", {"name": "threshold_band", "params": {"hgh": 0.8}})
        Traceback (most recent call last):
        ValueError: The selector 'threshold_band' has no parameter 'hgh'. Did you mean 'high'? Known: low, high, closed.
    """
    base = BASES[kind]
    if isinstance(spec, str):
        spec = {"name": spec}
    if isinstance(spec, ComponentConfig):
        spec = {"name": spec.name, "params": spec.params}
    if isinstance(spec, Mapping):
        for known, params in (("name", "params"), ("class_path", "init_args")):
            if known in spec:
                for key in spec:
                    if key not in (known, params):
                        raise ValueError(f"The {kind} has no key {shown(key)}. {nearest(key, (known, params))}")
                cls_or_name, given = spec[known], spec.get(params)
                given = {} if given is None else given
                if not isinstance(cls_or_name, str) or not isinstance(given, Mapping):
                    raise ValueError(f"The {kind} is {shown(spec)}. Give {known} as text and {params} as a mapping.")
                cls = lookup(kind, cls_or_name) if known == "name" else _imported(cls_or_name, base)
                return construct(cls, given, f"{kind} {cls_or_name!r}", offered)
        raise ValueError(f"The {kind} is {shown(spec)}. Give {{name, params}} or {{class_path, init_args}}.")
    if not isinstance(spec, base):
        raise ValueError(
            f"The {kind} is {shown(spec)}. Give a name, {{name, params}}, {{class_path, init_args}} or a "
            f"{base.__name__}."
        )
    return spec


def _imported(class_path: str, base: type) -> type:
    """The class, from the module that the path names: what a module does when it is imported, it does then."""
    module, _, name = class_path.rpartition(".")
    try:
        if not all(part.isidentifier() for part in class_path.split(".")):
            raise ImportError("it is no path of names")
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does
        raise ValueError(
            f"class_path {shown(class_path)} cannot be imported: {error}. Give package.module.Class."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"class_path {class_path!r} is no {base.__name__}. Give a class that derives from it.")
    return cls
