"""Shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.loaders import loaders_as_they_were


@pytest.fixture(autouse=True)
def _two_cores() -> None:
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _loaders_as_they_were() -> Iterator[None]:
    with loaders_as_they_were():
        yield
