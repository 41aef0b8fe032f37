"""Numbers in double precision, and what they are held against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Any, expected: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(got, dtype=float), expected, rtol=1e-9, atol=atol)
