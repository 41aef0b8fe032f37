"""The selectors: one small class per rule, a thin shell over `functional.selection`, `.subsets` and `.drawing`."""

from lightning_dataflex.selectors.bands import (
    LIMR,
    NonzeroVariance,
    OnlineDifficultyFilter,
    ThresholdBand,
    VCRLSelector,
)
from lightning_dataflex.selectors.combined import AllOf, AnyOf, Not
from lightning_dataflex.selectors.draws import DOTS, Bernoulli, SelectiveBackprop
from lightning_dataflex.selectors.groups import CPPO, GFPO, MaxVariance
from lightning_dataflex.selectors.shares import Nearest, TopKFraction, VarianceTopK, VarianceTopP
from lightning_dataflex.selectors.tokens import HighEntropyTokens, Lopti

__all__ = [
    "AllOf",
    "AnyOf",
    "Bernoulli",
    "CPPO",
    "DOTS",
    "GFPO",
    "HighEntropyTokens",
    "LIMR",
    "Lopti",
    "MaxVariance",
    "Nearest",
    "NonzeroVariance",
    "Not",
    "OnlineDifficultyFilter",
    "SelectiveBackprop",
    "ThresholdBand",
    "TopKFraction",
    "VCRLSelector",
    "VarianceTopK",
    "VarianceTopP",
]
