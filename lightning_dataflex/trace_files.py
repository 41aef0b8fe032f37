"""The files of a decision trace: one rank's part of it, as JSON Lines or as Parquet."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dataflex.functional.choices import shown

Rows = Mapping[str, Sequence[Any]]
"""The columns of `COLUMNS`, of as many rows each."""

COLUMNS = ("step", "uid", "domain", "score", "kept", "weight", "reason", "reward", "length", "label")


class Part(ABC):
    """What one rank writes of a trace.

    Args:
        path: Of the trace.
        rank: Of the process, among those that hold different samples.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.path, self.rank = Path(path), rank

    @staticmethod
    def of(path: str | os.PathLike[str], rank: int = 0) -> Part:
        """A part in the format that the path's suffix names."""
        return (JsonPart if Path(path).suffix == ".jsonl" else ParquetPart)(path, rank)

    @abstractmethod
    def ranks(self) -> set[int]:
        """Whose parts of the trace are there already."""

    @abstractmethod
    def append(self, rows: Rows) -> None:
        """Write rows to the end."""

    @abstractmethod
    def cut(self, step: int) -> int:
        """Take out the rows of this step and of later ones, and what was not written whole; how many rows stay."""


class JsonPart(Part):
    """A file of one object a line: that of rank 0 is the path itself, `trace.rank1.jsonl` is the next.

    Numbers that are not finite are written as null.
    """

    OTHERS = r"\.rank(\d+)\.jsonl"
    """How the name of another rank's part ends."""

    @property
    def file(self) -> Path:
        return self.path.with_suffix(f".rank{self.rank}.jsonl") if self.rank else self.path

    @classmethod
    def of_others(cls, path: Path) -> list[Path]:
        """The parts that other ranks have written beside that of rank 0."""
        return [cls(path, rank).file for rank in sorted(cls(path).ranks() - {0})]

    def ranks(self) -> set[int]:
        name = re.compile(re.escape(self.path.stem) + self.OTHERS)
        folder = self.path.parent
        found = [name.fullmatch(each.name) for each in folder.iterdir()] if folder.is_dir() else []
        return {int(each[1]) for each in found if each} | ({0} if self.path.exists() else set())

    def append(self, rows: Rows) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(dict(zip(COLUMNS, row)), ensure_ascii=False) for row in zip(*map(_plain, _ordered(rows)))]
        with self.file.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)

    def cut(self, step: int) -> int:
        if not self.file.exists():
            return 0
        num_rows = end = 0
        with self.file.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    if self._step(line) >= step:
                        break
                    num_rows, end = num_rows + 1, end + len(line)
        if end < self.file.stat().st_size:
            os.truncate(self.file, end)
        return num_rows

    def _step(self, line: bytes) -> int:
        try:
            row = json.loads(line)
            if set(row) == set(COLUMNS):
                return int(row["step"])
        except (ValueError, TypeError, RecursionError):
            pass  # said below, as of any other line that is none of a trace
        raise ValueError(f"{str(self.file)!r} holds what is no row of a trace: {shown(line)}. Give another path.")


class ParquetPart(Part):
    """Files in a folder that any reader of Parquet takes for one table, a new one each time rows are written."""

    def ranks(self) -> set[int]:
        return {int(name[0]) for name, _ in self._files()}

    def append(self, rows: Rows) -> None:
        import pyarrow as pa

        text, kinds = pa.string(), {"step": pa.int64(), "length": pa.int32(), "kept": pa.bool_()}
        kinds |= dict.fromkeys(("score", "weight", "reward"), pa.float32())
        arrays = [
            pa.array(values, kinds.get(name, text), from_pandas=True) for name, values in zip(COLUMNS, _ordered(rows))
        ]
        self._write(pa.table(arrays, list(COLUMNS)), len(self._files(self.rank)))

    def cut(self, step: int) -> int:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        num_rows = 0
        for (_, number), file in self._files(self.rank):
            before = pq.read_table(file)
            table = before.filter(pc.less(before["step"], step))
            if not table.num_rows:
                file.unlink()
            elif table.num_rows < before.num_rows:
                self._write(table, int(number))
            num_rows += table.num_rows
        return num_rows

    def _files(self, rank: int | None = None) -> list[tuple[tuple[str, str], Path]]:
        """Rank and number of each file, and the file, in order."""
        which = r"\d+" if rank is None else str(rank)
        name = re.compile(rf"rank({which})-(\d+)\.parquet")
        found = [(name.fullmatch(each.name), each) for each in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(((each[1], each[2]), file) for each, file in found if each)

    def _write(self, table: Any, number: int) -> None:
        import pyarrow.parquet as pq

        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / f"rank{self.rank}-{number:06d}.parquet"
        # Readers leave out what begins with a dot, and there is never half a file under the name.
        unfinished = file.with_name(f".{file.name}")
        pq.write_table(table, unfinished)
        os.replace(unfinished, file)


def _ordered(rows: Rows) -> list[Sequence[Any]]:
    return [rows[name] for name in COLUMNS]


def _plain(values: Sequence[Any]) -> list[Any]:
    """Values that JSON knows, single-precision numbers in as few digits as tell them apart."""
    if not isinstance(values, np.ndarray):
        return list(values)
    if values.dtype.kind != "f":
        return values.tolist()
    return [
        value if known else None for value, known in zip(values.astype(str).astype(float).tolist(), np.isfinite(values))
    ]
