"""What is true of each number is what PyTorch, or plain Python, says of it."""

from __future__ import annotations

import math
import operator
import warnings

import pytest
import torch

from lightning_dataflex.functional import policy
from lightning_dataflex.functional.comparing import compared, is_finite, is_nan, may_hold_nan, without_nan

NUMBERS = [0.0, -0.0, 0.1, 1.0, 16777216.0, -3.4e38, torch.inf, -torch.inf, torch.nan]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", [operator.gt, operator.ge, operator.lt, operator.le])
@pytest.mark.parametrize("limit", [0.1, 0.0, 16777215.9, 1e39, -math.inf, math.inf])
def test_numbers_are_compared_in_full_precision(how, dtype, limit) -> None:
    values = torch.tensor(NUMBERS).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compared(how, values.view(3, 3), limit)
        of_a_tensor = compared(how, values, torch.tensor(limit, dtype=torch.float64))
    # Python's numbers are of 64 bits.
    assert found.flatten().tolist() == of_a_tensor.tolist() == [how(value, limit) for value in values.tolist()]


@pytest.mark.parametrize("values", [torch.arange(3), torch.tensor(2.0), torch.ones(0), torch.ones(2, 0)])
def test_whole_numbers_one_number_and_none_are_compared(values) -> None:
    assert compared(operator.ge, values, 2).tolist() == (values >= 2).tolist()
    assert is_nan(values).tolist() == values.isnan().tolist()
    assert is_finite(values).tolist() == values.isfinite().tolist()
    assert not may_hold_nan(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_is_found(dtype) -> None:
    values = torch.tensor(NUMBERS).to(dtype)
    assert is_nan(values).tolist() == [math.isnan(value) for value in values.tolist()]
    assert is_finite(values).tolist() == [math.isfinite(value) for value in values.tolist()]
    assert may_hold_nan(values)
    assert not may_hold_nan(values[:4])
    assert without_nan(values).tolist() == [*values[:-1].tolist(), 0.0]


def test_what_is_turned_around_when_it_is_read_or_has_a_gradient_is_asked_too() -> None:
    turned = torch.complex(torch.ones(2), torch.tensor([2.0, torch.nan])).conj().imag
    assert turned.is_neg()
    assert (
        compared(operator.lt, turned, -1.0).tolist()
        == is_finite(turned).tolist()
        == [
            True,
            False,
        ]
    )
    values = torch.tensor([2.0, torch.nan], requires_grad=True)
    assert compared(operator.gt, values, 1.0).tolist() == [True, False]
    assert is_nan(values).tolist() == [False, True]


@pytest.mark.parametrize("other", [[-1.0, -2.0], [-1.0, -torch.inf]], ids=["finite", "with one that is impossible"])
def test_a_log_ratio_of_0_has_a_gradient(other) -> None:
    log_probs = torch.tensor([other], requires_grad=True)

    ratio = policy.log_ratio(log_probs, torch.tensor([other]))
    ratio.sum().backward()

    assert ratio.tolist() == [[0.0, 0.0]]
    assert log_probs.grad is not None
    assert log_probs.grad[0, 0] == 1.0


def test_a_log_ratio_of_nan_is_nan() -> None:
    ratio = policy.log_ratio(torch.tensor([torch.nan, -1.0, -torch.inf]), torch.tensor([torch.nan, -torch.inf, -1.0]))
    assert ratio.isnan().tolist() == [True, False, False]
    assert ratio[1:].tolist() == [torch.inf, -torch.inf]
