"""A plain batch, the same numbers in other types and layouts, and fields that cannot be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.hostile import INF, NAN, SCALARS

N, L = 8, 4


def plain_batch(seed: int) -> dict[str, Any]:
    """Groups of 4 whose numbers any float type holds exactly."""
    draw = np.random.default_rng(seed)
    mask = np.arange(L) < draw.integers(1, L + 1, N)[:, None]
    batch: dict[str, Any] = {"response_mask": torch.tensor(mask.astype(np.float32))}
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"):
        batch[name] = torch.tensor(-draw.integers(1, 24, (N, L)) / 8, dtype=torch.float32)
    batch["entropies"] = torch.tensor(draw.integers(1, 24, (N, L)) / 8, dtype=torch.float32)
    batch["advantages"] = torch.tensor(draw.integers(-16, 16, (N, L)) / 8, dtype=torch.float32)
    for name in ("rm_scores", "difficulty", "limr_score", "rollout_step"):
        top = 5 if name == "rollout_step" else 9
        batch[name] = torch.tensor(draw.integers(0, top, N) / (1 if top == 5 else 8), dtype=torch.float32)
    batch["rollout_is_weights"] = torch.tensor(draw.integers(1, 9, (N, L)) / 8, dtype=torch.float32)
    return batch | {"uid": ["a", "b"] * (N // 2), "domain": (["code", "logic", "math"] * N)[:N]}


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


UIDS: dict[str, Any] = {
    "tuples": [("a",), ("b", 1)] * (N // 2),
    "bytes": [b"a", b"b"] * (N // 2),
    "texts": np.array(["a", "b"] * (N // 2)),
    "objects": np.array(["a", "b"] * (N // 2), dtype=object),
    "mixed": ["a", 3] * (N // 2),
    "odd": [2.5, "ü/\n"] * (N // 2),
    "floats": torch.tensor([1.0, 2.0] * (N // 2)),
    "big": [2**200, -(2**200)] * (N // 2),
    "unsigned": np.array([2**63, 2**63 + 1] * (N // 2), dtype=">u8"),
    "unsigned tensor": torch.tensor([3, 4] * (N // 2)).to(torch.uint64),
    **{form: ARRAYS[form](np.array([7, 9] * (N // 2))) for form in ARRAYS},
}

NUMERIC = [name for name in plain_batch(0) if name not in ("uid", "domain")]


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
    "endless numbers": lambda rows: [10**5000] * len(rows),
    "tuples of too much": lambda rows: [(10**5000, "a")] * len(rows),
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
