"""Rollouts: the samples of saved rollouts by this project's field names, whoever has saved them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_dataflex.core.registry import nearest
from lightning_dataflex.preview.tables import table_of

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = {
    "step": ("step", "global_step"),
    "rm_scores": ("rm_scores", "reward", "score", "rewards"),
    "uid": ("uid", "group_id", "prompt_id"),
    "domain": ("domain", "data_source"),
    "advantages": ("advantages", "advantage"),
    "length": ("length", "num_tokens", "response_length", "completion_length"),
}
"""Of each field the columns that are taken for it, the first that is there."""
TOKENS = ("response_ids", "completion_ids", "output_ids", "token_ids")
PROMPTS, TEXTS = ("prompt", "input", "question"), ("completion", "output", "response")
VERL, TRL = {"input", "output", "score"}, {"prompt", "completion", "advantage"}
"""The columns by which verl's rollout dumps, and TRL's logs of completions, are known."""
MOST_STEP, MOST_LENGTH = 2**53, 2**31
"""What a step, and a number of tokens, is below."""


@dataclass
class Rollouts:
    """Samples in the order of their steps.

    Attributes:
        table: As the files have it, in their order.
        fields: Which column is which field.
        order: The place in the table of each sample.
        columns: Of each sample its `step`, `length`, and where they are there `rm_scores`, `uid`, `domain` and
            `advantages`; ids are whole numbers.
        domains: The names of the domains.
        notes: Where columns are from, where that does not go without saying.
        asked: The fields that were looked for.
    """

    table: pa.Table
    fields: dict[str, str]
    order: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    domains: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    @property
    def num_samples(self) -> int:
        return self.table.num_rows

    def steps(self) -> Iterator[tuple[int, slice]]:
        """Each step, and where its samples are."""
        steps, starts = np.unique(self.columns["step"], return_index=True)
        for step, start, end in zip(steps.tolist(), starts.tolist(), [*starts[1:].tolist(), self.num_samples]):
            yield step, slice(start, end)

    def missing(self, name: str, reader: str) -> str:
        """What to tell the user when a rule reads what is not there."""
        has = ", ".join(self.table.column_names)
        return (
            f"{reader} reads {name}, and the rollouts have no column of that name. They have: {has}. If it is there "
            f"under another name, map it: --fields {name}=COLUMN."
        )

    def column(self, name: str) -> pa.ChunkedArray | None:
        """The column of a field, as the files have it; None where there is none."""
        self.asked.add(name)
        source = self.fields.get(name, name)
        return self.table[source] if source in self.table.column_names else None

    def numbers(self, name: str, column: Any) -> np.ndarray:
        """A column of numbers for a field, of each sample, float64, NaN for null.

        Raises:
            ValueError: It holds something else.
        """
        import pyarrow as pa

        try:
            return np.asarray(column.cast(pa.float64(), safe=False).to_numpy()).astype(float)[self.order]
        except (pa.ArrowException, ValueError) as error:
            raise ValueError(f"The column for {name} holds {column.type}. Give one of numbers.") from error

    def lists(self, column: Any) -> Any:
        """A column of lists, of each sample."""
        return column.combine_chunks().take(self.order)


def rollouts_of(paths: Sequence[str], fields: Mapping[str, str] | None = None) -> Rollouts:
    """The samples of these files.

    Args:
        paths: Files or folders.
        fields: Which column is which field, where `NAMES` does not say so.

    Raises:
        ValueError: A file cannot be read, there is no column of a mapped name, or none for the rewards' numbers.
    """
    table, fields = table_of(paths), dict(fields or {})
    import pyarrow.compute as pc

    for name, column in fields.items():
        if column not in table.column_names:
            raise ValueError(
                f"--fields maps {name} to {column!r}, and the rollouts have no such column. "
                f"{nearest(column, table.column_names)}"
            )
    notes: list[str] = []
    labels = table["label"].unique().to_pylist() if {"label", "reason"} <= set(table.column_names) else []
    if len(labels) > 1:
        table = table.filter(pc.equal(table["label"], labels[0]))
        notes.append(f"a trace of several callbacks: the rows of {labels[0]} are read")
    for name, choices in NAMES.items():
        found = [each for each in choices if each in table.column_names and table[each].null_count < table.num_rows]
        if name == "rm_scores" and set(table.column_names) >= VERL:
            found = ["score"]
        if found and name not in fields:
            fields[name] = found[0]
    result = Rollouts(table, fields, np.arange(table.num_rows), notes=notes)
    _order(result)
    _fill(result)
    return result


def _order(rollouts: Rollouts) -> None:
    steps = rollouts.column("step")
    if steps is None:
        rollouts.notes.append("no step column: all samples are taken for one step (--fields step=COLUMN)")
        rollouts.columns["step"] = np.zeros(rollouts.num_samples, np.int64)
        return
    numbers = rollouts.numbers("step", steps)
    if np.isnan(numbers).any():
        raise ValueError("The column for step has rows without a number. Give every row its step.")
    odd = numbers[(np.abs(numbers) >= MOST_STEP) | (numbers != np.floor(numbers))]
    if len(odd):
        raise ValueError(f"The column for step has {odd[0]:g}. Give whole numbers below 2^53.")
    rollouts.order = np.argsort(numbers, kind="stable")
    rollouts.columns["step"] = numbers[rollouts.order].astype(np.int64)


def _fill(rollouts: Rollouts) -> None:
    columns, notes, fields = rollouts.columns, rollouts.notes, rollouts.fields
    for name in ("rm_scores", "advantages"):
        column = rollouts.column(name)
        if column is not None and not is_list(column):
            with np.errstate(over="ignore"):
                columns[name] = rollouts.numbers(name, column).astype(np.float32)
            if fields.get(name, name) != name:
                notes.append(f"{name} from {fields[name]}")
    if "rm_scores" not in columns and set(rollouts.table.column_names) >= TRL:
        _sum_of_rewards(rollouts)
    prompt = next((name for name in PROMPTS if name in rollouts.table.column_names), None)
    uid = rollouts.column("uid")
    if uid is None and prompt is not None:
        uid = rollouts.table[prompt]
        notes.append(f"no uid: samples of one step with the same {prompt} are a group")
    if uid is not None:
        columns["uid"] = _codes(rollouts, uid)[0]
    domain = rollouts.column("domain")
    if domain is not None:
        columns["domain"], names = _codes(rollouts, domain)
        rollouts.domains = [str(name) for name in names]
    columns["length"] = _lengths(rollouts)


def _sum_of_rewards(rollouts: Rollouts) -> None:
    import pyarrow as pa

    known = {"step", "advantage", "mode"}
    schema = rollouts.table.schema
    names = [
        each.name
        for each in schema
        if each.name not in known and (pa.types.is_floating(each.type) or pa.types.is_integer(each.type))
    ]
    if names:
        parts = np.stack([rollouts.numbers(name, rollouts.table[name]) for name in names])
        nothing = np.isnan(parts).all(0)
        rollouts.columns["rm_scores"] = np.where(nothing, np.nan, np.nansum(parts, 0)).astype(np.float32)
        what = f"the sum of {' + '.join(names)}, weights of 1" if len(names) > 1 else names[0]
        rollouts.notes.append(f"rm_scores from {what} (--fields rm_scores=COLUMN for another)")


def _lengths(rollouts: Rollouts) -> np.ndarray:
    """Tokens of each sample: as a column says, as many ids, or else characters."""
    import pyarrow.compute as pc

    given, names = rollouts.column("length"), rollouts.table.column_names
    if given is not None and not is_list(given):
        numbers = rollouts.numbers("length", given)
        if not (numbers >= 0).all():
            raise ValueError("The column for length has rows without a number >= 0. Give every row its length.")
        if not (numbers < MOST_LENGTH).all():
            raise ValueError(f"The column for length has {numbers.max():g}. Give numbers below 2^31.")
        return numbers.astype(np.int64)
    ids = given if given is not None else next((rollouts.table[name] for name in TOKENS if name in names), None)
    if ids is not None and is_list(ids):
        return rollouts.numbers("length", pc.fill_null(pc.list_value_length(ids), 0)).astype(np.int64)
    for name in TEXTS:
        if name in names:
            rollouts.notes.append(f"length is the number of characters of {name} (--fields length=COLUMN for tokens)")
            column = rollouts.table[name]
            if _is_text(column):
                return np.maximum(rollouts.numbers(name, pc.fill_null(pc.utf8_length(column), 0)), 1).astype(np.int64)
            return np.array([max(len(str(each)), 1) for each in column.to_pylist()])[rollouts.order]
    rollouts.notes.append("no lengths: every sample counts as one token (--fields length=COLUMN)")
    return np.ones(rollouts.num_samples, np.int64)


def _codes(rollouts: Rollouts, column: Any) -> tuple[np.ndarray, list[Any]]:
    """Equal whole numbers for equal values, of each sample, and the values."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        # Each part of a file may have a dictionary of its own.
        column = column.cast(column.type.value_type)
    try:
        encoded = column.dictionary_encode(null_encoding="encode")
    except pa.ArrowException:
        # Conversations are lists of turns, of which Arrow makes no dictionary.
        encoded = pa.chunked_array([[str(each) for each in column.to_pylist()]]).dictionary_encode()
    codes = np.concatenate([np.asarray(chunk.indices) for chunk in encoded.chunks]).astype(np.int64)
    return codes[rollouts.order], encoded.chunk(0).dictionary.to_pylist()


def is_list(column: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(column.type) or pa.types.is_large_list(column.type)


def _is_text(column: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
