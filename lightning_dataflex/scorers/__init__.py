"""The scorers: one small class per signal, a thin shell over `functional.scoring`."""

from lightning_dataflex.scorers.policy import TokenProb
from lightning_dataflex.scorers.rewards import (
    AdvantageMagnitude,
    GroupRewardVariance,
    GroupSolveRate,
    RewardDifficulty,
)

__all__ = ["AdvantageMagnitude", "GroupRewardVariance", "GroupSolveRate", "RewardDifficulty", "TokenProb"]
