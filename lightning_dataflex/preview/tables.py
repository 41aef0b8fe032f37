"""Files of rollouts as one table: JSON Lines, CSV and Parquet, and folders of them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dataflex.core.checks import check_nesting, listed
from lightning_dataflex.core.files import check_file, check_size
from lightning_dataflex.trace_files import JsonPart

if TYPE_CHECKING:
    import pyarrow as pa

MOST_BYTES, MOST_ROWS = 2**34, 50_000_000
"""Of all files together, unpacked."""
MOST_LINE, MOST_OPEN = 2**26, 500
"""Bytes of JSON that are parsed at a time, and brackets of a line that need no look at how they are nested."""
KINDS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".csv": "csv"}
MEND = "Mend it, or give another file."
CURE = "Give a file, or a folder of files, that ends in .parquet, .jsonl or .csv."


def table_of(paths: Sequence[str]) -> pa.Table:
    """The rows of all files, one after the other; a column that some file lacks is null there.

    Raises:
        ValueError: A file is not there, too large or none of these formats, or pyarrow is not installed.
    """
    if not find_spec("pyarrow"):
        raise ValueError("pyarrow, which reads rollouts, is not installed. Install lightning_dataflex[see].")
    import pyarrow as pa

    files = list(dict.fromkeys(file for path in paths for file in _files(Path(path))))
    for file in files:
        check_file(file, MOST_BYTES, CURE)
    check_size("What is to be read", sum(file.stat().st_size for file in files), MOST_BYTES, "Give fewer files.")
    tables = [_read(file) for file in files]
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"The files have columns of one name and several types: {error}. Give them apart.") from error
    if not table.num_rows:
        raise ValueError(f"{paths[0]!r} has no rows. Give rollouts.")
    if table.num_rows > MOST_ROWS:
        raise ValueError(f"There are {table.num_rows:,} rows, and at most {MOST_ROWS:,} are read. Give fewer files.")
    return table


def _files(path: Path) -> list[Path]:
    """The file, with the parts of other ranks beside a `.jsonl` file; or what is in a folder, of one format."""
    if path.is_dir():
        inside = [each for each in sorted(path.iterdir()) if not each.name.startswith(".") and each.suffix in KINDS]
        kinds = dict.fromkeys(KINDS[each.suffix] for each in inside)
        if len(kinds) > 1:
            raise ValueError(
                f"The folder {str(path)!r} holds files of several formats, {listed(each.name for each in inside)}. "
                "Give those that are rollouts."
            )
        if inside:
            return inside
        raise ValueError(f"The folder {str(path)!r} holds no rollouts. {CURE}")
    if path.suffix not in KINDS:
        raise ValueError(f"{str(path)!r} is of no format that is read here. {CURE}")
    return [path, *JsonPart.of_others(path)] if path.suffix == ".jsonl" else [path]


def _check_lines(file: Path) -> None:
    """Raise a ValueError for what is no object a line, or nested so deep that Arrow would end the process."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text, where = line.strip(), f"Line {number} of {str(file)!r}"
            if number == 1:
                # A mark of the encoding, which Arrow leaves out as well.
                text = text.removeprefix(codecs.BOM_UTF8)
            if text[:1] == b"{" and text[-1:] != b"}" and not line.endswith(b"\n"):
                raise ValueError(
                    f"{where} is only half written, as of a run that was stopped or still writes. Delete that line, or "
                    "wait for the rest."
                )
            if text and (text[:1] != b"{" or text[-1:] != b"}" or len(text) > MOST_LINE // 2):
                raise ValueError(f"{where} is no JSON object of at most {MOST_LINE // 2:,} bytes. {MEND}")
            if text.count(b"[") + text.count(b"{") > MOST_OPEN:
                try:
                    check_nesting(where, json.loads(text))
                except RecursionError as error:
                    raise ValueError(f"{where} is nested too deep. Write it flatter.") from error


def _check_encoding(file: Path) -> None:
    with file.open("rb") as opened:
        start = opened.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError(f"{str(file)!r} is written in UTF-16. Save it in UTF-8.")


def _read(file: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    if KINDS[file.suffix] != "parquet":
        _check_encoding(file)
    try:
        if KINDS[file.suffix] == "json":
            _check_lines(file)
            return pyarrow.json.read_json(file, read_options=pyarrow.json.ReadOptions(block_size=MOST_LINE))
        if KINDS[file.suffix] == "csv":
            return pyarrow.csv.read_csv(file)
        with pyarrow.parquet.ParquetFile(file) as parquet:
            groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            check_size(f"{str(file)!r}, unpacked,", size, MOST_BYTES, "Give fewer rows.")
            return parquet.read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"{str(file)!r} cannot be read as {KINDS[file.suffix]}: {first_line}. {MEND}") from error
