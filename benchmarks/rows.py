"""Step time against the kept fraction of the samples, with `drop: rows` and with `drop: mask`.

    python benchmarks/rows.py

The update of the example's policy on one rollout batch: forward, backward and optimiser step. A straight line through
the origin would be ideal. All fractions are timed in turn, round after round; what is printed are medians and quartiles
of the ratios within a round, so that a busy machine is shared alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.rlhf.policy import embedded_model
from lightning_dataflex import RolloutBatch
from lightning_dataflex.core.samples import Layout, compacted
from lightning_dataflex.functional.loss import policy_loss

FRACTIONS = (1.0, 1 / 2, 1 / 4, 1 / 8)


def rollout(num_samples: int, prompt: int, response: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "input_ids": torch.randint(3, 20, (num_samples, prompt + response)),
        "attention_mask": torch.ones(num_samples, prompt + response, dtype=torch.int64),
        "response_mask": torch.ones(num_samples, response, dtype=torch.int64),
        "old_log_probs": torch.full((num_samples, response), -3.0),
        "advantages": torch.randn(num_samples, 1).expand(-1, response),
    }


def masked(batch: dict[str, torch.Tensor], fraction: float) -> dict[str, torch.Tensor]:
    """The batch with that share of its samples kept."""
    keep = torch.arange(len(batch["response_mask"])) < fraction * len(batch["response_mask"])
    return batch | {"response_mask": batch["response_mask"] * keep[:, None]}


def step_time(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], drop: str
) -> float:
    start = time.perf_counter()
    if drop == "rows":
        batch = compacted(RolloutBatch(batch), Layout())
    width = batch["response_mask"].shape[1]
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=width + 1).logits
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, -width:, None])[..., 0]
    policy_loss(log_probs, batch["old_log_probs"], batch["advantages"], batch["response_mask"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def spread(seen: list[float], reference: list[float]) -> str:
    """Median and quartiles of the ratios, round by round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seen, reference)], n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, batch = embedded_model(0), rollout(args.samples, args.prompt, args.response)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    times: dict[tuple[str, float], list[float]] = {(drop, f): [] for drop in ("rows", "mask") for f in FRACTIONS}
    for _ in range(args.rounds + 1):
        for (drop, fraction), seen in times.items():
            seen.append(step_time(model, optimizer, masked(batch, fraction), drop))
    whole = times["rows", 1.0][1:]
    print("| kept | `rows`: time, as a share of the whole step's | ratio to the ideal line | `mask`: time |")
    print("|---|---|---|---|")
    for fraction in FRACTIONS:
        # Of the same round, so that both had the same neighbours.
        rows, mask = (spread(times[drop, fraction][1:], whole) for drop in ("rows", "mask"))
        ratio = spread(times["rows", fraction][1:], [fraction * time for time in whole])
        print(f"| {fraction:g} | {rows} | {ratio} | {mask} |")


if __name__ == "__main__":
    main()
