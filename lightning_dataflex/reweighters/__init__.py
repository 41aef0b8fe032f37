"""The reweighters: one small class per rule, a thin shell over `functional.weighting`."""

from lightning_dataflex.reweighters.scores import DifficultyBand, PerAdvantage, Softmax
from lightning_dataflex.reweighters.tokens import AdvantageReweight

__all__ = ["AdvantageReweight", "DifficultyBand", "PerAdvantage", "Softmax"]
