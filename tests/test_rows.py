"""`drop: rows` in a real Trainer: the loss sees kept samples alone, and the parameters move as with `drop: mask`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_dataflex import DataFlexCallback
from tests.launch import SCRIPT, run
from tests.toy import MOUNTS, Toy, fit, kept_rows, rollout

SELECT = {"scorer": "group_solve_rate", "actuator": "threshold_band"}
HALF = {"scorer": "advantage_magnitude", "actuator": "topk_fraction"}


class Seen(Toy):
    """Notes how many samples, and how many columns, its loss is computed on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shapes: list[tuple[int, int]] = []

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        self.shapes.append(tuple(batch["response_mask"].shape))
        assert all(len(value) == len(batch["uid"]) for value in batch.values())
        return super()._loss(batch)


def trained(offers: str, *callbacks: DataFlexCallback, batches: Any = None, **settings: Any) -> Seen:
    module = Seen(offers, **settings)
    fit(module, list(callbacks), batches or [rollout(seed) for seed in (0, 2, 3)])
    return module


@pytest.mark.parametrize("offers", ["point", "batch"])
def test_parameters_move_as_with_masks_on_fewer_rows(offers: str) -> None:
    masked = trained(offers, DataFlexCallback("select", **SELECT, mount=MOUNTS[offers]))
    rows = trained(offers, DataFlexCallback("select", **SELECT, mount=MOUNTS[offers], drop="rows"))
    kept = [int(kept_rows(rollout(seed)).sum()) for seed in (0, 2, 3)]
    assert [shape[0] for shape in rows.shapes] == kept
    assert max(kept) < 8
    torch.testing.assert_close(rows.linear.weight, masked.linear.weight, rtol=0, atol=1e-12)
    assert not torch.equal(rows.linear.weight, Toy().linear.weight)


def test_tokens_that_no_kept_sample_has_leave_with_trim() -> None:
    batch = rollout(0)
    batch["response_mask"] = batch["response_mask"] * (torch.arange(5) < 2) | (
        (torch.tensor(kept_rows(batch)) == 0)[:, None] & (torch.arange(5) < 4)
    )
    batch["rm_scores"] = torch.where(torch.arange(5) == 0, batch["rm_scores"].sum(-1, keepdim=True), 0.0)
    fields = ["features", "actions"]
    whole = trained("point", DataFlexCallback("select", **SELECT, drop="rows"), batches=[batch])
    cut = trained(
        "point", DataFlexCallback("select", **SELECT, drop="rows", trim=True, token_fields=fields), batches=[batch]
    )
    assert (whole.shapes[0][1], cut.shapes[0][1]) == (5, 2)
    torch.testing.assert_close(cut.linear.weight, whole.linear.weight, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"features has 5 columns.*token_fields"):
        trained("point", DataFlexCallback("select", **SELECT, drop="rows", trim=True), batches=[batch])


@pytest.mark.parametrize("offers", ["point", "batch"])
@pytest.mark.parametrize("order", [1, -1])
def test_rows_leave_once_every_callback_has_seen_them(offers: str, order: int) -> None:
    def callbacks(drop: str) -> list[DataFlexCallback]:
        mount = MOUNTS[offers]
        weigh = DataFlexCallback("reweight", "advantage_magnitude", "softmax", mount=mount)
        return [DataFlexCallback("select", **SELECT, drop=drop, mount=mount), weigh][::order]

    masked, rows = trained(offers, *callbacks("mask")), trained(offers, *callbacks("rows"))
    torch.testing.assert_close(rows.linear.weight, masked.linear.weight, rtol=0, atol=1e-12)
    assert rows.shapes < masked.shapes


def test_two_selectors_drop_what_either_drops() -> None:
    a = {"drop": "rows", "label": "a"}
    rows = trained("point", DataFlexCallback("select", **SELECT, **a), DataFlexCallback("select", **HALF, label="b"))
    masked = trained("point", DataFlexCallback("select", **SELECT), DataFlexCallback("select", **HALF))
    torch.testing.assert_close(rows.linear.weight, masked.linear.weight, rtol=0, atol=1e-12)


def test_a_step_in_which_nothing_is_kept_has_one_blank_row_and_moves_nothing() -> None:
    batch = rollout(0) | {"rm_scores": torch.zeros(8, 5)}
    with pytest.warns(UserWarning, match="keeps no sample"):
        module = trained("point", DataFlexCallback("select", **SELECT, drop="rows"), batches=[batch])
    assert module.shapes == [(1, 5)]
    assert torch.equal(module.linear.weight, Toy().linear.weight)


def test_a_callback_that_only_watches_leaves_the_rows() -> None:
    module = trained("point", DataFlexCallback("select", **SELECT, drop="rows", enforce=False))
    assert [shape[0] for shape in module.shapes] == [8, 8, 8]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_keep_their_own_rows_and_one_without_any_takes_part(world: int, tmp_path: Path) -> None:
    for drop in ("mask", "rows"):
        (tmp_path / drop).mkdir()
        run([*SCRIPT, "ddp", str(world), str(tmp_path / drop), "1", "cpu", drop])
    for rank in range(world):
        masked, rows = (torch.load(tmp_path / drop / f"{rank}.pt") for drop in ("mask", "rows"))
        torch.testing.assert_close(rows["weight"], masked["weight"], rtol=0, atol=1e-12)
        assert rows["logged"] == masked["logged"]
        assert rows["num_rows"] < masked["num_rows"]


class OwnLoss(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.policy_loss = torch.nn.Identity()


REFUSED = {
    "loss": ({"mount": "policy_loss"}, "drop is 'rows', but at mount 'policy_loss' the policy has seen the dropped"),
    "gradient": ({"mount": "on_before_backward"}, "at mount 'on_before_backward' the policy has seen"),
    "trim": ({"drop": "mask", "trim": True}, "trim is true, but drop is 'mask'"),
    "trim type": ({"trim": "yes"}, "trim is 'yes'. It must be true or false"),
    "shared": ({"shared_fields": "a"}, "shared_fields is 'a'. Give a list of names"),
    "drop": ({"drop": "row"}, "drop is 'row'. Did you mean 'rows'"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=list(REFUSED))
def test_settings_that_do_not_go_together_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataFlexCallback("select", **SELECT | {"drop": "rows"} | change)


def test_a_module_in_which_rows_cannot_leave_in_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"drop is 'rows', and OwnLoss has no DataFlexPoint.*or use drop: mask"):
        DataFlexCallback("select", **SELECT, drop="rows").mount_kind(OwnLoss())
    at_batch = DataFlexCallback("select", **HALF, mount="on_train_batch_start")
    with pytest.raises(ValueError, match="the callbacks act at on_train_batch_start and point"):
        trained("point", DataFlexCallback("select", **SELECT, drop="rows"), at_batch)
