"""Values that nobody should give, the same numbers in other clothes, and what an error of ours looks like."""

from __future__ import annotations

import ast
import datetime
import functools
import re
import traceback
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

NAN, INF = float("nan"), float("inf")


class Nasty:
    """Fails at everything that one may do to show or compare it."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equal")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = None  # type: ignore[assignment]


def called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("what a configuration names was called")


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


TEXTS = [
    "",
    " ",
    "x",
    "nan",
    "null",
    "0.5",
    "1",
    "true",
    "ünï/cødé",
    "a\nb",
    "\0",
    "\ud800",
    "x" * 5000,
    "🜁",
    "../..",
    ".",
]
NAMES = [
    "os.system",
    "__import__('os')",
    "builtins.eval",
    "eval",
    "__class__",
    "tests.hostile.called",
    "${HOME}",
    "a.b",
]
NUMBERS: list[Any] = [
    NAN,
    INF,
    -INF,
    0,
    -1,
    -0.0,
    1e-320,
    1e308,
    1e39,
    2**31,
    2**63,
    -(2**70),
    10**400,
    -(10**5000),
    1e6,
]
OTHERS: list[Any] = [
    None,
    True,
    False,
    b"1",
    b"",
    1j,
    Decimal("0.5"),
    datetime.date(2025, 1, 1),
    print,
    called,
    int,
    object(),
]
OTHERS += [
    Nasty(),
    range(3),
    {1, 2},
    torch.tensor(0.5),
    torch.ones(2),
    np.float32(0.5),
    np.int64(1),
    np.ones(2),
    iter([1]),
]
OTHERS += [nested(40), nested(5000), nested(5000, dict), endless(), np.array(["a", "b"]), np.bool_(True), ...]

FIXED = [*TEXTS, *NAMES, *NUMBERS, *OTHERS]


def fixed(place: int) -> Any:
    return FIXED[place]


# By their place: hypothesis would show them, and for some there is no text.
SCALARS = st.integers(0, len(FIXED) - 1).map(fixed) | st.integers() | st.floats() | st.text(max_size=8)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*TEXTS, *NAMES, "name", "params", "scorer", 3, None]), inner, max_size=3)
    ),
    max_leaves=5,
)
"""Anything that a configuration may hold where something else is wanted."""


# -- an error of ours --------------------------------------------------------------------------------------------------


@functools.cache
def _raises(path: str) -> list[tuple[int, int]]:
    """The lines of each `raise` of a file."""
    tree = ast.parse(Path(path).read_text())
    return [(node.lineno, node.end_lineno or 0) for node in ast.walk(tree) if isinstance(node, ast.Raise)]


def not_ours(error: BaseException) -> str:
    """Why an error is none that the package raises itself, for the user to read; empty if it is."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    where = f"{frame.f_code.co_filename}:{line}"
    if not frame.f_globals.get("__name__", "").startswith("lightning_dataflex."):
        return f"raised in {where}"
    if not any(first <= line <= last for first, last in _raises(frame.f_code.co_filename)):
        return f"not raised but happened in {where}"
    if type(error) not in (ValueError, TypeError):
        return f"{type(error).__name__} in {where}"
    text = str(error)
    if not re.search(r"[\w)'\"}\]>`.?]\. [A-Z`]", text) or not text.rstrip().endswith((".", "?")) or len(text) > 2000:
        return f"no sentence of fact and one of cure in {where}"
    return ""


# -- the same numbers in other clothes ---------------------------------------------------------------------------------


def of_fields(array: np.ndarray) -> np.ndarray:
    """A view into records, whose rows lie a prime number of bytes apart."""
    records = np.zeros(array.shape, dtype=[("pad", "u1", 3), ("value", array.dtype)])
    records["value"] = array
    return records["value"]


def read_only(array: np.ndarray) -> np.ndarray:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def objects(array: np.ndarray) -> np.ndarray:
    return np.array(array.tolist(), dtype=object).reshape(array.shape)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor * 0 - 7], -1)[..., 0]


ARRAYS: dict[str, Any] = {
    "backwards": lambda a: a[::-1].copy()[::-1],
    "big endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "big endian backwards": lambda a: a[::-1].astype(a.dtype.newbyteorder(">"))[::-1],
    "Fortran": np.asfortranarray,
    "of records": of_fields,
    "read-only": read_only,
    "objects": objects,
    "list": lambda a: a.tolist(),
    "tuple": lambda a: tuple(a.tolist()),
    "list of arrays": lambda a: list(a) if a.ndim > 1 else a.tolist(),
    "list of tensors": lambda a: [torch.tensor(row) for row in a],
    "strided": lambda a: strided(torch.tensor(a)),
    "transposed": lambda a: torch.tensor(a).T.contiguous().T if a.ndim > 1 else torch.tensor(a),
    "array": lambda a: a,
    "tensor": torch.tensor,
}
LAYOUTS = ("backwards", "big endian", "big endian backwards", "Fortran", "of records", "read-only")
FLOATS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")},
    **{f"np.{name}": np.dtype(name) for name in ("f2", "f4", "f8", "g")},
}
WHOLE: dict[str, Any] = {
    **{
        name: getattr(torch, name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **{f"np.{name}": np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")},
}
BOOLS: dict[str, Any] = {"bool": torch.bool, "np.bool": np.dtype("?")}


def clothed(values: np.ndarray, dtype: Any, form: str, grad: bool) -> Any:
    """The same numbers in another type and layout."""
    if isinstance(dtype, torch.dtype):
        tensor = torch.tensor(values).to(dtype)
        if form in ("strided", "transposed") and dtype.is_floating_point:
            tensor = strided(tensor) if form == "strided" else tensor.T.contiguous().T if tensor.dim() > 1 else tensor
        return tensor.requires_grad_() if grad and dtype.is_floating_point and tensor.is_leaf else tensor
    array = values.astype(dtype)
    # PyTorch makes no tensor of these, NumPy no plain numbers.
    narrow = dtype.kind == "u" and form in ("list of tensors", "strided", "transposed", "tensor")
    return array if narrow or (dtype == np.dtype("g") and form not in LAYOUTS) else ARRAYS[form](array)


# -- what cannot be read -----------------------------------------------------------------------------------------------


WRONG: dict[str, Any] = {
    "texts": lambda rows: ["x"] * len(rows),
    "numbers in texts": lambda rows: ["0.5"] * len(rows),
    "a text of that length": lambda rows: "x" * len(rows),
    "Nones": lambda rows: [None] * len(rows),
    "ragged": lambda rows: [[1.0] * (i % 3 + 1) for i in range(len(rows))],
    "ragged array": lambda rows: np.array([np.ones(i + 1) for i in range(len(rows))], dtype=object),
    "longer": lambda rows: [*list(rows), next(iter(rows))],
    "huge": lambda rows: [10**30] * len(rows),
    "mixed": lambda rows: ([1.0, "x", None, b"1", (1,)] * len(rows))[: len(rows)],
    "dates": lambda rows: np.array(["2020-01-01"] * len(rows), "M8[D]"),
    "records": lambda rows: np.zeros(len(rows), dtype=[("a", "f8"), ("b", "i4")]),
    "mappings": lambda rows: [{"a": 1}] * len(rows),
}
WRONG_NUMBERS: dict[str, Any] = {
    "shorter": lambda rows: rows[:-1],
    "wider": lambda rows: torch.nn.functional.pad(rows, (0, 1)),
    "deeper": lambda rows: rows[..., None, None],
    "one": lambda rows: rows.flatten()[0],
    "complex": lambda rows: rows + 1j,
    "complex array": lambda rows: rows.numpy() + 1j,
    "meta": lambda rows: rows.to("meta"),
    "sparse": lambda rows: rows.to_sparse(),
    "nested": lambda rows: torch.nested.nested_tensor(list(torch.ones(len(rows), 2))),
    "quantized": lambda rows: torch.quantize_per_tensor(rows.float(), 0.1, 0, torch.qint8),
    "float8": lambda rows: rows.to(torch.float8_e4m3fn),
    "masked": lambda rows: np.ma.masked_array(rows.numpy(), mask=rows.numpy() > 0),
    "NaN": lambda rows: rows * NAN,
    "infinite": lambda rows: rows + INF,
    "-infinite": lambda rows: rows - INF,
    "some NaN": lambda rows: torch.where(rows > rows.mean(), NAN, rows),
    "some infinite": lambda rows: torch.where(rows > rows.mean(), INF, rows),
    "negative": lambda rows: -rows - 1,
    "1e300": lambda rows: rows * 0 + 1e300,
    "1e38": lambda rows: rows.float() * 1e38,
    "largest": lambda rows: rows.long() * 0 + 2**63 - 1,
    "empty": lambda rows: rows[:0],
    "no tokens": lambda rows: rows[:, :0] if rows.dim() > 1 else rows[:0],
    "a mapping": lambda rows: {"a": rows},
}


@st.composite
def wrong(draw: Any, rows: Any) -> Any:
    """A field of a batch that is not what it should be."""
    kinds = WRONG if isinstance(rows, list) else WRONG | WRONG_NUMBERS
    if draw(st.booleans()):
        return draw(SCALARS)
    return kinds[draw(st.sampled_from(list(kinds)))](rows)
