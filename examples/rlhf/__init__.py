"""RL fine-tuning of a language model in Lightning, as an example of where a data scheduler goes."""

from examples.rlhf.data import PromptDataModule
from examples.rlhf.module import RLHFModule
from examples.rlhf.report import Report

__all__ = ["PromptDataModule", "RLHFModule", "Report"]
