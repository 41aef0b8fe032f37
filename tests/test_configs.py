"""Every configuration of the example is checked and trains two steps from the command line."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.rlhf.policy import embedded_model
from lightning_dataflex.cli import main

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _one_thread(_two_cores: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face checkpoint with a tokenizer, as a user's."""
    folder = tmp_path_factory.mktemp("checkpoint")
    signs = ["<pad>", "<s>", "</s>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyz+-,= "]
    tokenizer = Tokenizer(models.WordLevel({sign: i for i, sign in enumerate(signs)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    embedded_model(0, vocab_size=len(signs), hidden_size=16, intermediate_size=16).save_pretrained(folder)
    return folder


def small(config: Path, checkpoint: Path, folder: Path) -> list[str]:
    """Arguments that make a configuration small, and nothing else than small."""
    model = {"num_generations": 4, "max_new_tokens": 3}
    data = {"num_train": 8, "num_held_out": 2, "batch_size": 4}
    trainer = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    if config.stem in ("refill", "pods", "greso", "mopps"):
        trainer |= {"max_epochs": -1, "max_steps": 2, "limit_train_batches": 1.0}
    if config.stem == "llm":
        model |= {"model_path": checkpoint}
        data |= {"source": "embedded", "domains": "[copy,addition]"}
        trainer |= {"accelerator": "cpu", "devices": 1, "strategy": "auto", "precision": "32-true"}
        trainer |= {"val_check_interval": 2, "default_root_dir": folder}
    else:
        model |= {"warmup_steps": 2}
    logger = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={folder}"]
    groups = (("model", model), ("data", data))
    settings = [f"--{group}.init_args.{key}={value}" for group, values in groups for key, value in values.items()]
    return [f"--config={config}", *settings, *(f"--trainer.{k}={v}" for k, v in trainer.items()), *logger]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_checks_and_trains_two_steps(
    config: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["dataflex"])
    arguments = small(config, checkpoint, tmp_path)
    # What a run collects goes to the current directory.
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    main(["check", *arguments])
    checked = capsys.readouterr().out
    main(["fit", *arguments])
    (metrics,) = tmp_path.rglob("metrics.csv")
    steps = [row for row in csv.DictReader(metrics.open()) if row.get("loss/total")]
    assert len(steps) == 2
    logs = {
        "baseline": [],
        "refill": ["kept_frac", "rounds", "carried"],
        "greso": ["greso/skipped", "refill/rounds"],
        "mopps": ["passed", "skipped"],
        "mix": ["prop_copy", "lag"],
        "mix_select": ["mix/prop_copy", "select/kept_frac"],
        "rlep": ["replayed", "pool_size"],
    }
    names = logs.get(config.stem, ["kept_frac"])
    assert ("DataFlexPoint" in checked) == (bool(names) and config.stem != "rlep")
    for row in steps:
        assert all(row[f"dataflex/{name}"] for name in names)
        assert bool(names) == any(name.startswith("dataflex/") for name in row)


def test_there_are_configurations() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"baseline", "select", "difficulty", "reweight", "ppo", "llm", "mix", "mix_select"} <= names
    assert {"refill", "pods", "greso", "mopps", "rlep"} <= names
