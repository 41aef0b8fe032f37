"""A component from what a configuration says of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dataflex.core.registry import BASES, Kind, construct, lookup, nearest


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
        spec: What to build.
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
                        raise ValueError(f"The {kind} has no key {key!r}. {nearest(str(key), (known, params))}")
                cls_or_name, given = spec[known], spec.get(params) or {}
                if not isinstance(cls_or_name, str) or not isinstance(given, Mapping):
                    raise ValueError(f"The {kind} is {dict(spec)!r}. Give {known} as text and {params} as a mapping.")
                cls = lookup(kind, cls_or_name) if known == "name" else _imported(cls_or_name, base)
                return construct(cls, given, f"{kind} {cls_or_name!r}", offered)
        raise ValueError(f"The {kind} is {dict(spec)!r}. Give {{name, params}} or {{class_path, init_args}}.")
    if not isinstance(spec, base):
        raise ValueError(
            f"The {kind} is {spec!r}. Give a name, {{name, params}}, {{class_path, init_args}} or a {base.__name__}."
        )
    return spec


def _imported(class_path: str, base: type) -> type:
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"class_path {class_path!r} cannot be imported: {error}. Give package.module.Class."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"class_path {class_path!r} is no {base.__name__}. Give a class that derives from it.")
    return cls
