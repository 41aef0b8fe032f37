"""What the keys of a `dataflex` block may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lightning_dataflex.core.checks import check_whole
from lightning_dataflex.core.compat import check_estimator
from lightning_dataflex.core.containers import ORIGINAL
from lightning_dataflex.core.fields import FIELDS
from lightning_dataflex.core.files import check_trace_path
from lightning_dataflex.core.registry import nearest
from lightning_dataflex.functional.choices import shown

Mechanism = Literal["select", "reweight", "mix"]
Drop = Literal["mask", "rows", "weight"]
OnEmpty = Literal["skip", "keep", "raise"]
Scope = Literal["global", "rank"]
LogLevel = Literal["debug", "info", "warning"]


def check_keys(title: str, block: Mapping[str, Any], cls: type) -> None:
    """Raise a ValueError for a key that a dataclass has no field for."""
    known = [f.name for f in dataclasses.fields(cls)]
    for name in block:
        if name not in known:
            raise ValueError(f"{title} has no key {shown(name)}. {nearest(name, known)}")


def is_path(value: object) -> bool:
    """Whether a value is a dotted path of names, none of them one of Python's own with two underscores.

    Example:
        >>> is_path("losses.policy"), is_path("__class__"), is_path("eval()"), is_path(3)
        (True, False, False, False)
    """
    parts = value.split(".") if isinstance(value, str) else [""]
    return all(part.isidentifier() and not part.startswith("__") for part in parts)


def check_values(block: Mapping[str, Any]) -> None:
    """Raise a ValueError for a value that its key does not take, as far as one can say without the components."""
    words = {"mechanism": Mechanism, "drop": Drop, "on_empty": OnEmpty, "scope": Scope, "log_level": LogLevel}
    for name, choices in words.items():
        if name in block and not (isinstance(block[name], str) and block[name] in get_args(choices)):
            raise ValueError(f"{name} is {shown(block[name])}. {nearest(block[name], get_args(choices))}")
    for name, least in (("warmup_step", 0), ("update_step", 1), ("trace_every", 1), ("trace_rows", 1)):
        check_whole(name, block.get(name, least), least)
    for name in ("enforce", "trim"):
        if not isinstance(block.get(name, True), bool):
            raise ValueError(f"{name} is {shown(block[name])}. It must be true or false.")
    if block.get("trim") and block.get("drop") != "rows":
        raise ValueError(f"trim is true, but drop is {block.get('drop', 'mask')!r}. Only drop: rows changes shapes.")
    _check_names(block)
    if block.get("trace") is not None:
        check_trace_path(block["trace"])
    if block.get("adv_estimator") is not None:
        check_estimator(block["adv_estimator"])


def _check_names(block: Mapping[str, Any]) -> None:
    for name in ("shared_fields", "token_fields"):
        names = block.get(name)
        if not isinstance(names, (list, tuple, type(None))) or not all(isinstance(each, str) for each in names or ()):
            raise ValueError(f"{name} is {shown(names)}. Give a list of names of the batch's fields.")
    fields = block.get("fields")
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping) or not all(isinstance(text, str) for pair in fields.items() for text in pair):
        raise ValueError(f"fields is {shown(fields)}. It must map our names to yours, {{rm_scores: rewards}}.")
    key = block.get("weights_key", "rollout_is_weights")
    taken = [
        *(name for name in FIELDS if name != "rollout_is_weights"),
        *(theirs for ours, theirs in fields.items() if ours != "rollout_is_weights"),
    ]
    if not isinstance(key, str) or not key or key.startswith(ORIGINAL) or key in taken:
        raise ValueError(f"weights_key is {shown(key)}. Give the name of a field that holds nothing but weights.")
    domains = block.get("domains")
    if domains is not None and not (
        isinstance(domains, (list, tuple, Mapping)) and all(type(each) in (str, int) for each in domains)
    ):
        raise ValueError(f"domains is {shown(domains)}. Give a list of names, or a mapping of names to weights.")
    mount = block.get("mount")
    if mount is not None and not is_path(mount):
        raise ValueError(
            f"mount is {shown(mount)}. Give point, the name of the module or method that computes the policy loss, "
            "on_train_batch_start or on_before_backward."
        )
    label = block.get("label")
    if label is not None and not (isinstance(label, str) and label.strip() and label.isprintable()):
        raise ValueError(f"label is {shown(label)}. Give a text without line breaks.")
