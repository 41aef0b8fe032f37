"""What mixers have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_dataflex.core.checks import check_range, check_whole
from lightning_dataflex.core.mixer import Mixer
from lightning_dataflex.functional.proportions import FloorMethod, check_floor, check_method, floored


class Floored(Mixer):
    """A rule that gives every domain a floor.

    Args:
        floor: Least proportion of a domain.
        floor_by: `water_filling` takes what the floor needs from the others in proportion, `mixture` mixes with
            equal shares.
        window: Steps of each domain that its score is the mean of.
    """

    def __init__(self, floor: float, floor_by: FloorMethod, window: int) -> None:
        check_range("floor", floor, 0, 1)
        check_method(floor_by)
        check_whole("window", window, 1)
        self.floor, self.floor_by, self.window = floor, floor_by, window

    def bind(self, domains: Sequence[str]) -> None:
        check_floor(self.floor, len(domains))
        super().bind(domains)

    def floored(self, proportions: Tensor) -> Tensor:
        return floored(proportions, self.floor, self.floor_by)
