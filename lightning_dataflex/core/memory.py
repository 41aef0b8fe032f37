"""What components remember, in a checkpoint: under names, so that a run with other settings finds what is its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_dataflex.core.plain import plain, restored
from lightning_dataflex.core.registry import init_parameters, registered_name
from lightning_dataflex.core.scorer import METRIC_OPTIONS, Scorer
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.choices import shown


def title(component: Any) -> str:
    """What a component is called among others: its name, and the titles of what it is made of.

    Example:
        >>> from lightning_dataflex import build
        >>> title(build("scorer", "weighted_sum", scorers=["outcome", build("scorer", "rank", scorer="outcome")]))
        'weighted_sum(outcome(), rank(outcome()))'
    """
    return f"{registered_name(component)}({', '.join(getattr(component, 'part_titles', ()))})"


def distinct(titles: Sequence[str], descriptions: Sequence[str]) -> list[str]:
    """The titles, those that come again with a number, in the order of their descriptions.

    Example:
        >>> distinct(["ema(outcome())", "outcome()", "ema(outcome())"], ["decay=0.9", "", "decay=0.1"])
        ['ema(outcome())#2', 'outcome()', 'ema(outcome())']
    """
    found, count = list(titles), dict.fromkeys(titles, 0)
    for place in sorted(range(len(found)), key=lambda place: descriptions[place]):
        count[titles[place]] += 1
        if count[titles[place]] > 1:
            found[place] += f"#{count[titles[place]]}"
    return found


def described(component: Any) -> str:
    """A component as a configuration has it, as text.

    Example:
        >>> from lightning_dataflex import build
        >>> described(build("selector", "threshold_band", low=0.2, high=0.8))
        'threshold_band(low=0.2, high=0.8, closed=False)'
    """
    names = [name for name in init_parameters(type(component)) if name not in METRIC_OPTIONS]
    settings = {name: vars(component)[name] for name in names if name in vars(component)}
    # Another object's text may be another in each process.
    texts = {name: repr(value) if _is_plain(value) else type(value).__name__ for name, value in settings.items()}
    parts = [*getattr(component, "part_descriptions", ()), *(f"{name}={text}" for name, text in texts.items())]
    return f"{registered_name(component)}({', '.join(parts)})"


def memory_of(component: Any) -> dict[str, Any]:
    """What a component remembers, and which it is: for a checkpoint."""
    state, name = component.state_dict(), registered_name(component)
    if not isinstance(state, Mapping):
        raise ValueError(f"state_dict of {name} returned {shown(state)}. Return a dict of what it remembers.")
    return {"name": title(component), "state": plain(state, f"What {name} remembers")}


def recall(component: Any, saved: Mapping[str, Any]) -> None:
    """Give a component back what `memory_of` gave.

    What another component has remembered is not read, and of one that is made of others each part gets its own, by
    title; what it remembers itself is of their scores, and not read if they are others. A warning names what is left
    over, and what starts without a memory.
    """
    name, before = registered_name(component), saved["name"].partition("(")[0]
    if before != name:
        if saved["state"]:
            warn_once(component, f"The checkpoint has the memory of {before}. {name} starts without one.")
        return
    state = restored(saved["state"])
    if isinstance(component, Scorer):
        own = component.state_dict()
        if saved["name"] != title(component):
            if len(state) > len(_of_parts(state)):
                message = f"The checkpoint has the memory of {saved['name']}. {title(component)} starts without one."
                warn_once(component, message)
            state, own = _of_parts(state), _of_parts(own)
        state = matched_parts(component, state, own)
        component.load_state_dict(state, strict=False)
    else:
        component.load_state_dict(state)


def matched_parts(component: Any, saved: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Of saved memories those that a component has a part for; a warning names the others."""
    own = list(own)
    gone, new = [each for each in saved if each not in own], [each for each in own if each not in saved]
    if gone or new:
        warn_once(
            component,
            f"The checkpoint was written by another {registered_name(component)}. What it remembers of "
            f"{_listed(gone)} is dropped; {_listed(new)} start without a memory.",
        )
    return {each: state for each, state in saved.items() if each in own}


def _of_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith("parts.")}


@contextmanager
def reading(state_key: str) -> Iterator[None]:
    """Say whose state it was that a checkpoint does not have as it should be.

    Raises:
        ValueError: What is done within has failed.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"The checkpoint's state of {state_key} cannot be read ({type(error).__name__}: {error}): another version "
            "has written it, or it was changed. Resume from another checkpoint, or take the state out of this one to "
            f"start without a memory: del checkpoint['callbacks'][{state_key!r}]."
        ) from error


def _is_plain(value: Any) -> bool:
    """Whether a value has the same text on every rank and in every run."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int, float, type(None)))


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(key.removeprefix("parts.").removesuffix("._extra_state") for key in keys) or "none"


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two descriptions, as text; empty if nothing does.

    Example:
        >>> changes({"drop": "mask", "trim": "False"}, {"drop": "rows", "trim": "False"})
        'drop: mask, now rows'
    """
    names = dict.fromkeys([*saved, *now])
    differ = [name for name in names if saved.get(name) != now.get(name)]
    return "; ".join(f"{name}: {saved.get(name, 'not there')}, now {now.get(name, 'not there')}" for name in differ)
