"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_cores() -> None:
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace: dict) -> None:
    doctest_namespace["torch"] = torch
