"""The scorers: one small class per signal, a thin shell over `functional.scoring`, `.policy` and `.combining`."""

from lightning_dataflex.scorers.advantages import Advantage, AdvantageMagnitude
from lightning_dataflex.scorers.averages import EMA
from lightning_dataflex.scorers.columns import Metadata, ResponseLength, Staleness
from lightning_dataflex.scorers.combined import Product, Rank, WeightedSum, ZScore
from lightning_dataflex.scorers.policy import (
    DistillGap,
    ImportanceRatio,
    RefKL,
    SequenceEntropy,
    SequenceLogprob,
    TokenEntropy,
    TokenProb,
)
from lightning_dataflex.scorers.rewards import (
    Efficiency,
    GroupRewardVariance,
    GroupSolveRate,
    GroupStd,
    GroupVariance,
    Outcome,
    RewardDifficulty,
)

__all__ = [
    "Advantage",
    "AdvantageMagnitude",
    "DistillGap",
    "EMA",
    "Efficiency",
    "GroupRewardVariance",
    "GroupSolveRate",
    "GroupStd",
    "GroupVariance",
    "ImportanceRatio",
    "Metadata",
    "Outcome",
    "Product",
    "Rank",
    "RefKL",
    "ResponseLength",
    "RewardDifficulty",
    "SequenceEntropy",
    "SequenceLogprob",
    "Staleness",
    "TokenEntropy",
    "TokenProb",
    "WeightedSum",
    "ZScore",
]
