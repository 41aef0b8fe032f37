"""The reweighters: one small class per rule, a thin shell over `functional.weighting` and `functional.shaping`."""

from lightning_dataflex.reweighters.entropy import GRPOS, GTPO
from lightning_dataflex.reweighters.groups import ODSW, PFPPO, Focal, GRPOLead
from lightning_dataflex.reweighters.regression import AWR, RWR
from lightning_dataflex.reweighters.scores import (
    AbsAdvantagePower,
    DifficultyBand,
    DomainWeight,
    LengthDebias,
    PerAdvantage,
    Softmax,
)
from lightning_dataflex.reweighters.tokens import MIS, TIS, AdvantageReweight

__all__ = [
    "AWR",
    "GRPOS",
    "GTPO",
    "MIS",
    "ODSW",
    "PFPPO",
    "RWR",
    "TIS",
    "AbsAdvantagePower",
    "AdvantageReweight",
    "DifficultyBand",
    "DomainWeight",
    "Focal",
    "GRPOLead",
    "LengthDebias",
    "PerAdvantage",
    "Softmax",
]
