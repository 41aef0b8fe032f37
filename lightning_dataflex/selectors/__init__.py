"""The selectors: one small class per rule, a thin shell over `functional.selection`."""

from lightning_dataflex.selectors.bands import ThresholdBand
from lightning_dataflex.selectors.groups import CPPO, GFPO, MaxVariance
from lightning_dataflex.selectors.shares import Bernoulli, Nearest, TopKFraction

__all__ = ["CPPO", "GFPO", "Bernoulli", "MaxVariance", "Nearest", "ThresholdBand", "TopKFraction"]
