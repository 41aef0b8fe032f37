"""The mixers: one small class per rule, a thin shell over `functional.mixing`."""

from lightning_dataflex.mixers.learned import DADS, ODM, DoReMi, Exp3
from lightning_dataflex.mixers.scheduled import E2H, AdaRFT
from lightning_dataflex.mixers.windowed import PLR, TSCL, VCRL, DumpUCB, RewardGap, Static

__all__ = ["AdaRFT", "DADS", "DoReMi", "DumpUCB", "E2H", "Exp3", "ODM", "PLR", "RewardGap", "Static", "TSCL", "VCRL"]
