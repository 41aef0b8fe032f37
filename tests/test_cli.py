"""The command line, in process, on a toy module."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from lightning_dataflex import DataFlexPoint, components
from lightning_dataflex.cli import main
from lightning_dataflex.core.registry import BASES
from tests.toy import kept_rows, per_token, policy, rollout, token_mean

ROOT = Path(__file__).parent.parent
BLOCK = {
    "mechanism": "select",
    "scorer": {"name": "group_solve_rate", "params": {"success_threshold": 0.5}},
    "actuator": {"name": "threshold_band", "params": {"low": 0.0, "high": 0.8}},
}
CLASS_BLOCK = {
    "mechanism": "reweight",
    "scorer": {"class_path": "lightning_dataflex.AdvantageMagnitude", "init_args": {"agg": "max"}},
    "actuator": {"class_path": "lightning_dataflex.Softmax"},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a configuration with a `dataflex` value and gives its path."""
    monkeypatch.setattr(sys, "argv", ["dataflex"])

    def write(dataflex: Any = BLOCK, **more: Any) -> str:
        trainer = {
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}},
        }
        content = {"model": {"class_path": "tests.toy.Toy"}, "data": {"class_path": "tests.toy.ToyData"}}
        content |= {"trainer": trainer | more.pop("trainer", {})} | more
        if dataflex is not None:
            content["dataflex"] = dataflex
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def logged(tmp_path: Path) -> list[dict[str, str]]:
    header, *rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    read = [dict(zip(header.split(","), row.split(","))) for row in rows]
    return [row for row in read if any(key.startswith("dataflex/") and value for key, value in row.items())]


def error(capsys: pytest.CaptureFixture, *args: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code not in (0, None)
    return capsys.readouterr().err + str(exit_.value.code)


def test_fit_with_a_block_and_an_override(config: Any, tmp_path: Path) -> None:
    main(["fit", "--config", config(), "--dataflex.actuator.params.high=0.3"])
    assert [float(row["dataflex/kept_frac"]) for row in logged(tmp_path)] == [0.0, 0.0]


def test_fit_with_a_list_of_blocks(config: Any, tmp_path: Path) -> None:
    main(["fit", "--config", config([BLOCK, CLASS_BLOCK])])
    keys = set(logged(tmp_path)[0])
    assert {"dataflex/select/kept_frac", "dataflex/reweight/kept_frac"} <= keys


def test_fit_with_a_block_from_a_file(config: Any, tmp_path: Path) -> None:
    block = tmp_path / "block.yaml"
    block.write_text(yaml.safe_dump(CLASS_BLOCK))
    main(["fit", "--config", config(None), f"--dataflex={block}"])
    assert "dataflex/weight_std" in logged(tmp_path)[0]


def test_fit_under_trainer_callbacks(config: Any, tmp_path: Path) -> None:
    callback = {"class_path": "lightning_dataflex.DataFlexCallback", "init_args": BLOCK}
    main(["fit", "--config", config(None, trainer={"callbacks": [callback]})])
    assert "dataflex/kept_frac" in logged(tmp_path)[0]


@pytest.mark.parametrize("command", ["validate", "test"])
def test_validate_and_test_run_with_a_block(config: Any, command: str, capsys: pytest.CaptureFixture) -> None:
    main([command, "--config", config()])
    assert "loss" in capsys.readouterr().out


def test_print_config_holds_the_block(config: Any, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", config(), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["dataflex"]["actuator"]["params"] == {"low": 0.0, "high": 0.8}


def test_help_explains(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dataflex"])
    with pytest.raises(SystemExit):
        main(["fit", "--dataflex.help", "DataFlexConfig"])
    text = " ".join(capsys.readouterr().out.split())
    assert "deletes them from the loss, denominators and KL included" in text


def listed_components(text: str) -> dict[str, str]:
    """What is said of each, by kind and name."""
    found: dict[str, str] = {}
    kind = key = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            kind = line
        elif line[2] != " ":
            name, _, rest = line.strip().partition(" ")
            found[key := f"{kind} {name}"] = rest.strip()
        else:
            found[key] += f" {line.strip()}"
    return found


@pytest.mark.parametrize("width", [40, 80, 200])
def test_components_are_listed(width: int, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    main(["components"])
    text = capsys.readouterr().out
    said = listed_components(text)
    assert said["scorers group_solve_rate"] == (
        "scores each prompt; signal: reward; needs groups; reads rm_scores, response_mask, uid; DAPO, arXiv:2503.14476"
    )
    assert "default scorer: metadata (column: limr_score)" in said["selectors limr"]
    assert said["mixers static"] == "per domain, prompt, response, token; default scorer: reward_difficulty"
    assert said["selectors all_of"] == "combines others"
    assert set(said) == {f"{kind}s {name}" for kind in BASES for name in components(kind)}
    assert max(map(len, text.splitlines())) <= max(width, 48)


def test_check_builds_without_training(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["check", "--config", config()])
    assert "ok: Toy on ToyData\n  select.group_solve_rate.threshold_band" in capsys.readouterr().out
    assert not (tmp_path / "lightning_logs").exists()


def changed(**keys: Any) -> dict[str, Any]:
    return BLOCK | keys


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (changed(mechanism="selct"), "mechanism is 'selct'. Did you mean 'select'?"),
        (changed(scorer={"name": "group_solv_rate"}), "no scorer 'group_solv_rate'. Did you mean 'group_solve_rate'?"),
        (changed(scorer={"nam": "x"}), "The scorer is {'nam': 'x'}"),
        (changed(actuator={"name": "threshold_band", "params": {"hgh": 1}}), "Did you mean 'high'?"),
        (changed(actuator={"name": "threshold_band", "params": {"low": "abc"}}), "'abc'. It must be of type float"),
        (changed(actuator={"name": "softmax"}), "There is no selector 'softmax'"),
        (changed(warmupstep=1), "Did you mean 'warmup_step'?"),
        (changed(drop="maks"), "Did you mean 'mask'?"),
        (changed(adv_estimator="gae"), "group_solve_rate compares the samples of a group, but adv_estimator 'gae'"),
        (changed(scorer={"name": "token_prob"}, actuator={"name": "gfpo"}), "token_prob scores each token"),
        ({"mechanism": "select", "scorer": {"name": "token_prob"}}, "The dataflex block lacks 'actuator'"),
        ([BLOCK, BLOCK], "Two blocks are called 'select.group_solve_rate.threshold_band'. Give one of them a label."),
        (changed(scorer={"class_path": "torch.nn.Linear"}), "is no Scorer"),
    ],
)
def test_typos_are_refused(config: Any, capsys: pytest.CaptureFixture, block: Any, says: str) -> None:
    assert says in error(capsys, "check", "--config", config(block))


def test_typo_in_an_override(config: Any, capsys: pytest.CaptureFixture) -> None:
    assert "Did you mean 'actuator'?" in error(capsys, "check", "--config", config(), "--dataflex.actuater=3")


def test_typo_in_a_command(capsys: pytest.CaptureFixture) -> None:
    assert "no command 'fitt'" in error(capsys, "fitt")


def test_check_sees_the_estimator_and_the_mount_of_the_module(config: Any, capsys: pytest.CaptureFixture) -> None:
    path = config()
    assert "'gae' has no groups" in error(capsys, "check", "--config", path, "--model.adv_estimator=gae")
    assert "no module or method 'policy_loss'" in error(capsys, "check", "--config", path, "--model.offers=batch")


def test_fit_refuses_an_estimator_without_groups(config: Any, capsys: pytest.CaptureFixture) -> None:
    assert "'gae' has no groups" in error(capsys, "fit", "--config", config(), "--model.adv_estimator=gae")


def test_the_console_script_and_the_module_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("dataflex")
    texts = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for command in ([str(script), "--help"], [sys.executable, "-m", "lightning_dataflex", "--help"])
    ]
    assert texts[0] == texts[1]
    assert "components" in texts[0]


@pytest.mark.parametrize("command", ["components", "--help"])
def test_whoever_reads_may_stop(command: str) -> None:
    begun = subprocess.Popen(
        [sys.executable, "-m", "lightning_dataflex", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert begun.stdout is not None
    begun.stdout.close()
    _, said = begun.communicate()
    assert (begun.returncode, said) == (0, b"")


@pytest.mark.parametrize("through", ["trainer", "cli"])
def test_in_the_other_namespace(through: str, config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    from lightning_dataflex import DataFlexCallback

    class Module(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dataflex, self.kept = policy(), DataFlexPoint(), []

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            batch = self.dataflex(batch)
            self.kept.append(float(batch["rollout_is_weights"].any(-1).float().mean()))
            return token_mean(per_token(self.linear, batch), batch)

        def train_dataloader(self) -> DataLoader:
            return DataLoader([rollout(0)], batch_size=None)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if through == "trainer":
        module = Module()
        callback = DataFlexCallback(**BLOCK)
        other.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback]
        ).fit(module)
    else:
        argv = ["prog", "fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
        argv += ["--trainer.enable_checkpointing=false", "--trainer.callbacks=lightning_dataflex.DataFlexCallback"]
        argv += [f"--trainer.callbacks.init_args.{key}={value}" for key, value in BLOCK.items()]
        monkeypatch.setattr(sys, "argv", argv)
        module = importlib.import_module("pytorch_lightning.cli").LightningCLI(Module, save_config_callback=None).model
    assert module.kept == [kept_rows(rollout(0)).mean()]
