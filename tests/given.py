"""A scorer that gives what it is told to, and a batch for it; the third sample has no valid token."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dataflex import Scorer

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
BATCH = {"x": torch.tensor([1.0, 2.0, 3.0, 4.0]), "response_mask": MASK, "uid": [7, 7, 8, 9]}


class Given(Scorer):
    """Gives what it is told to."""

    requires = ("x",)

    def __init__(self, given: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.given = given

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
        return batch["x"] if self.given is None else self.given
