"""Pick, weigh and mix the data of an RL fine-tuning run in PyTorch Lightning by adding one callback."""

from lightning_dataflex.callback import DataFlexCallback
from lightning_dataflex.core.actuator import Mixer, Reweighter, Selector
from lightning_dataflex.core.config import DataFlexConfig
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.registry import (
    build,
    components,
    register_mixer,
    register_reweighter,
    register_scorer,
    register_selector,
)
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.mount import DataFlexPoint
from lightning_dataflex.reweighters import AdvantageReweight, DifficultyBand, PerAdvantage, Softmax
from lightning_dataflex.scorers import AdvantageMagnitude, GroupSolveRate, RewardDifficulty, TokenProb
from lightning_dataflex.selectors import GFPO, MaxVariance, ThresholdBand, TopKFraction

__all__ = [
    "AdvantageMagnitude",
    "AdvantageReweight",
    "DataFlexCallback",
    "DataFlexConfig",
    "DataFlexPoint",
    "Decision",
    "DifficultyBand",
    "GFPO",
    "GroupSolveRate",
    "MaxVariance",
    "Mixer",
    "PerAdvantage",
    "Pipeline",
    "RewardDifficulty",
    "Reweighter",
    "RolloutBatch",
    "Scorer",
    "Selector",
    "Softmax",
    "ThresholdBand",
    "TokenProb",
    "TopKFraction",
    "build",
    "components",
    "register_mixer",
    "register_reweighter",
    "register_scorer",
    "register_selector",
]
