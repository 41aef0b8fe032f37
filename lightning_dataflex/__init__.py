"""Pick, weigh and mix the data of an RL fine-tuning run in PyTorch Lightning by adding one callback."""

from lightning_dataflex.callback import DataFlexCallback
from lightning_dataflex.core.actuator import Mixer, Reweighter, Selector
from lightning_dataflex.core.config import DataFlexConfig
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.prompt_scorer import PromptScorer
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
from lightning_dataflex.data import mixture_dataloader
from lightning_dataflex.mixers import (
    DADS,
    E2H,
    ODM,
    PLR,
    TSCL,
    VCRL,
    AdaRFT,
    DoReMi,
    DumpUCB,
    Exp3,
    RewardGap,
    Static,
)
from lightning_dataflex.mount import DataFlexPoint
from lightning_dataflex.prompt_scorers import GRESO, SPEED, MoPPS, PassRateBand
from lightning_dataflex.reweighters import AdvantageReweight, DifficultyBand, PerAdvantage, Softmax
from lightning_dataflex.sampler import DomainMixtureSampler
from lightning_dataflex.scorers import (
    AdvantageMagnitude,
    GroupRewardVariance,
    GroupSolveRate,
    RewardDifficulty,
    TokenProb,
)
from lightning_dataflex.selectors import CPPO, GFPO, Bernoulli, MaxVariance, Nearest, ThresholdBand, TopKFraction

__all__ = [
    "AdaRFT",
    "AdvantageMagnitude",
    "AdvantageReweight",
    "Bernoulli",
    "CPPO",
    "DADS",
    "DataFlexCallback",
    "DataFlexConfig",
    "DataFlexPoint",
    "Decision",
    "DifficultyBand",
    "DoReMi",
    "DomainMixtureSampler",
    "DumpUCB",
    "E2H",
    "Exp3",
    "GFPO",
    "GRESO",
    "GroupRewardVariance",
    "GroupSolveRate",
    "MaxVariance",
    "Mixer",
    "Mixture",
    "MoPPS",
    "Nearest",
    "ODM",
    "PLR",
    "PassRateBand",
    "PerAdvantage",
    "Pipeline",
    "PromptScorer",
    "RewardDifficulty",
    "RewardGap",
    "Reweighter",
    "RolloutBatch",
    "SPEED",
    "Scorer",
    "Selector",
    "Softmax",
    "Static",
    "TSCL",
    "ThresholdBand",
    "TokenProb",
    "TopKFraction",
    "VCRL",
    "build",
    "components",
    "mixture_dataloader",
    "register_mixer",
    "register_reweighter",
    "register_scorer",
    "register_selector",
]
