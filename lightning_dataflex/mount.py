"""How a callback gets between advantage and loss, and leaves again."""

from __future__ import annotations

from typing import Any

from torch import nn


class DataFlexPoint(nn.Module):
    """The place in a training step at which the data scheduler acts; without a callback it does nothing.

    Example:
        >>> point = DataFlexPoint()
        >>> point({"uid": [0]})
        {'uid': [0]}
    """

    def forward(self, batch: Any) -> Any:
        return batch
