"""What the pages show works: Python runs, modules train with what stands beside them, blocks and settings are built."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader

import lightning_dataflex
from lightning_dataflex import DataFlexCallback, components
from lightning_dataflex.core import registry
from lightning_dataflex.core.building import component
from lightning_dataflex.functional.advantages import grpo_advantages
from tests.pages import INCLUDED, PAGES, ROOT, blocks, every, inline
from tests.toy import Toy, as_it_is, per_token, policy, rollout

QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
MECHANISMS = {"selector": "select", "reweighter": "reweight", "mixer": "mix"}
OWN = {"my_components.MySolveRate", "my_rules.PromptLength"}
"""Class paths of the reader's own, of which the page shows the class."""


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_classes", {kind: dict(classes) for kind, classes in registry._classes.items()})
    # The example package is installed in no environment.
    monkeypatch.syspath_prepend(ROOT / "examples" / "plugin")
    monkeypatch.delitem(sys.modules, "short_first.components", raising=False)
    importlib.import_module("short_first.components")


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[lightning.pytorch.Trainer]:
    """Each Trainer that a page makes, quiet and short."""
    made: list[lightning.pytorch.Trainer] = []

    def trainer(**settings: Any) -> lightning.pytorch.Trainer:
        saves = any(isinstance(callback, Checkpoint) for callback in settings.get("callbacks", ()))
        made.append(original(**(QUIET | {"enable_checkpointing": saves} | settings)))
        return made[-1]

    original = lightning.pytorch.Trainer
    monkeypatch.setattr(lightning.pytorch, "Trainer", trainer)
    return made


def namespace() -> dict[str, Any]:
    """What a reader has: a module, a rollout batch, and what the blocks before have imported elsewhere."""
    batch = rollout()
    module = types.SimpleNamespace(dataflex=lightning_dataflex.DataFlexPoint())
    public = {name: getattr(lightning_dataflex, name) for name in ("DataFlexPoint", "Scorer", "register_scorer")}
    names = {"LightningModule": lightning.pytorch.LightningModule, "torch": torch, "batch": batch, "self": module}
    data = DataLoader([rollout(seed) for seed in range(12)], None)
    return {"__name__": "page", **public, **names, "module": Toy(), "data": data}


def run(page: Path) -> dict[str, Any]:
    """The names that a page's Python leaves; sessions with outputs are compared with them."""
    names = namespace()
    for place, text in blocks(page, "python"):
        if ">>>" in text:
            session = doctest.DocTestParser().get_doctest(text, names, place, place, 0)
            shown: list[str] = []
            result = doctest.DocTestRunner(verbose=False).run(session, out=shown.append, clear_globs=False)
            assert not result.failed, "".join(shown)
            names |= session.globs
        else:
            exec(compile(text, place, "exec"), names)  # our own documentation
    return names


WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page.parent.name != "rlhf"]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_runs_in_the_order_of_the_page(
    page: Path, trainers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


class Reader:
    """What the readers of the pages have already, as methods of their module."""

    num_generations = 2

    def setup(self, stage: str) -> None:
        self.linear, self.losses = policy(), []

    def generate(self, prompts: Any, num: int) -> dict[str, Any]:
        places = [int(row["prompt_id"][1:]) for row in prompts for _ in range(num)]
        batch = rollout(sum(places) % 5, len(places))
        batch["rm_scores"] = torch.tensor([float(place % 3 == 0 or i % 2) for i, place in enumerate(places)])
        return batch

    def rewards(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["rm_scores"]

    def advantages(self, batch: dict[str, Any]) -> torch.Tensor:
        ids = torch.arange(len(batch["uid"])) // self.num_generations
        return grpo_advantages(batch["rm_scores"], ids)[:, None].expand(batch["response_mask"].shape)

    def log_probs(self, batch: dict[str, Any]) -> torch.Tensor:
        chosen = batch["actions"][..., None]
        return self.linear(batch["features"]).log_softmax(-1).gather(-1, chosen)[..., 0]

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        weights, mask = batch.get("rollout_is_weights"), batch["response_mask"]
        losses = per_token(self.linear, batch)
        return (losses if weights is None else losses * weights).sum() / mask.sum().clamp(min=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rolled(Reader):
    def rollout(self, prompts: Any) -> dict[str, Any]:
        num = 4 if isinstance(prompts, dict) and "domain" in prompts else 2
        return rollout(0, num * len(next(iter(prompts.values()))))


def trained(names: dict[str, Any], name: str, base: type, trainer: Any, loader: Any) -> Any:
    module = type(name, (base, names[name]), {})()
    module.setup("fit")
    before = module.linear.weight.clone()
    trainer.fit(module, loader)
    assert module.losses
    assert not torch.equal(module.linear.weight, before)
    return module


MODULES = {"README": "MyRLHF", "own_module": "MyGRPO", "zh": "MyRLHF", "mixing": "MyRLHF"}


@pytest.mark.parametrize("stem", MODULES)
def test_the_module_of_a_page_trains_with_the_callback_of_the_page(stem: str, trainers: list[Any]) -> None:
    names = run(next(page for page in PAGES if page.stem == stem and page.parent.name != "rlhf"))
    rows = [{"prompt_id": f"p{i}", "domain": "ab"[i % 2]} for i in range(16)]
    loader = DataLoader(rows, 8)
    if "Prompts" in names:
        loader = names["Prompts"]()
        loader.dataset = rows
    (trainer,) = trainers
    trained(names, MODULES[stem], Rolled, trainer, loader)
    logged = set(trainer.callback_metrics)
    assert logged & {"dataflex/kept_frac", "dataflex/prop_a"}


def test_the_module_of_the_page_on_saving_refills_as_its_block_says(trainers: list[Any]) -> None:
    page = ROOT / "docs" / "saving.md"
    names = run(page)
    block = next(yaml.safe_load(text)["dataflex"] for _, text in blocks(page, "yaml") if "max_age" in text)
    block["refill"]["groups"] = 3
    trainer = lightning.pytorch.Trainer(callbacks=[DataFlexCallback(**block)])
    rows = DataLoader([{"prompt_id": f"p{i}"} for i in range(40)], 4, collate_fn=as_it_is)
    names["MyRLHF"].num_generations = 8
    trained(names, "MyRLHF", Reader, trainer, rows)
    assert trainer.callback_metrics["dataflex/kept"] >= 3


def built(block: dict[str, Any]) -> None:
    """Build a block as it stands; the reader's own classes are those that its page has shown."""
    text = yaml.safe_dump(block)
    for path in OWN:
        text = text.replace(path, "lightning_dataflex.GroupSolveRate")
    DataFlexCallback(**yaml.safe_load(text))


def built_of(block: dict[str, Any]) -> None:
    """Build what has a scorer or an actuator alone; the mechanism follows from the actuator."""
    actuator = block.get("actuator")
    if actuator is None:
        if block.get("scorer") != "greso":
            assert component("scorer", block["scorer"])
        return
    name = actuator if isinstance(actuator, str) else actuator["name"]
    of = [MECHANISMS[kind] for kind in MECHANISMS if name in components(kind)]  # type: ignore[arg-type]
    mechanism = block.get("mechanism", of[0])
    assert mechanism in of
    built({**block, "mechanism": mechanism})


@pytest.mark.parametrize("block", every("yaml"), ids=lambda block: block.place)
def test_every_yaml_block_is_built(block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(block.text)
    if set(content) == {"dataflex"}:
        given = content["dataflex"]
        for each in given if isinstance(given, list) else [given]:
            built(each)
    elif set(content) <= {"scorer", "actuator"}:
        # A fragment may leave to the block around it what its scores are.
        built_of({"scorer": "group_solve_rate"} | content if "actuator" in content else content)
    else:
        assert set(content) == {"trainer"}
        for each in content["trainer"]["callbacks"]:
            module, _, name = each["class_path"].rpartition(".")
            getattr(sys.modules[module], name)(**each["init_args"])


def settings() -> list[tuple[str, str]]:
    """Keys of a block, written within a sentence or a table: `mechanism: select, actuator: gfpo`."""
    found = [(page.name, code) for page in PAGES for code in inline(page)]
    keys = re.compile(r"\{?(mechanism|scorer|actuator): ")
    return sorted({pair for pair in found if keys.match(pair[1]) and not re.search(r"\.\.\.|…", pair[1])})


@pytest.mark.parametrize(("page", "code"), settings(), ids=lambda value: value)
def test_every_setting_within_a_sentence_is_built(page: str, code: str) -> None:
    block = yaml.safe_load(code if code.startswith("{") else "{" + code + "}")
    if set(block) != {"mechanism"}:
        built_of(block)


def test_a_block_that_is_a_file_names_one_that_is_there() -> None:
    named = [path for page in PAGES for path in re.findall(rf'{INCLUDED} "([^"]+)"', page.read_text())]
    assert named
    assert all((ROOT / path).is_file() for path in named)
