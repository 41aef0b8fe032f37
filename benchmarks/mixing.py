"""What each mixer does with domains whose learning is known: a simulation, over seeds.

    python benchmarks/mixing.py

Five domains. A domain's skill s is its solve rate. Training on a share x of the batch moves it by
rate * x * 4 s (1 - s): groups of equal rewards teach nothing.

    mastered     solved from the start
    learnable    starts low, and learns fast
    slow         starts low, and learns at a third of that rate
    drifting     learns as fast, but forgets a little at each step
    impossible   never solved

Printed are, as mean and standard deviation over seeds: the share of the prompts given to the three domains that can
be learned, the mean skill of the five at the end and over all steps, and the regret: what the latter lacks to that
of a teacher who knows the curves, and whose shares at every step are found by gradient ascent through them.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex import Mixture, components
from lightning_dataflex.functional.advantages import grpo_advantages
from lightning_dataflex.functional.proportions import apportioned

DOMAINS = ["mastered", "learnable", "slow", "drifting", "impossible"]
START = torch.tensor([0.98, 0.05, 0.05, 0.3, 0.0], dtype=torch.float64)
RATE = torch.tensor([0.0, 0.15, 0.05, 0.15, 0.0], dtype=torch.float64)
DRIFT = torch.tensor([0.0, 0.0, 0.0, 0.01, 0.0], dtype=torch.float64)
TO_LEARN = [1, 2, 3]
PROMPTS, GROUP = 32, 8
PARAMS = {
    "adarft": {"difficulty": {"mastered": 0, "drifting": 1, "learnable": 2, "slow": 3, "impossible": 4}},
    "e2h": {"order": ["mastered", "drifting", "learnable", "slow", "impossible"]},
}


def learned(skill: Tensor, share: Tensor) -> Tensor:
    return (skill + RATE * share * 4 * skill * (1 - skill) - DRIFT * skill).clamp(0, 1)


def rollout(skill: Tensor, counts: Tensor, rng: np.random.Generator) -> dict:
    domain = np.repeat(np.arange(len(DOMAINS)), counts.numpy() * GROUP)
    group = np.repeat(np.arange(PROMPTS), GROUP)
    rewards = torch.tensor((rng.uniform(size=len(domain)) < skill.numpy()[domain]).astype(np.float32))
    uid = torch.tensor(group)
    return {
        "rm_scores": rewards,
        "advantages": grpo_advantages(rewards, uid),
        "response_mask": torch.ones(len(domain), 1),
        "uid": uid,
        "domain": [DOMAINS[i] for i in domain],
    }


def run(name: str, params: dict, seed: int, num_steps: int) -> tuple[float, float, float]:
    """Share of the learnable domains, mean skill at the end, and over all steps."""
    rng = np.random.default_rng(seed)
    block = {"mechanism": "mix", "domains": DOMAINS, "actuator": {"name": name, "params": params}, "warmup_step": 5}
    mixture, skill, owed = Mixture.from_config(block), START, torch.zeros(len(DOMAINS), dtype=torch.float64)
    total, skills = torch.zeros(len(DOMAINS)), []
    for step in range(num_steps):
        shares = torch.tensor(list(mixture.proportions.values()))
        counts = apportioned(shares, PROMPTS, step, owed)
        owed = owed + shares * PROMPTS - counts
        mixture.observe(rollout(skill, counts, rng), step)
        mixture.end_step(step, progress=(step + 1) / num_steps)
        skill = learned(skill, counts / PROMPTS)
        total += counts
        skills.append(float(skill.mean()))
    return float(total[TO_LEARN].sum() / total.sum()), skills[-1], statistics.mean(skills)


def teacher(num_steps: int, num_ascents: int = 300) -> tuple[float, float, float]:
    """The same three numbers of the best shares, (steps, K), for the mean skill over all steps."""
    logits = torch.zeros(num_steps, len(DOMAINS), dtype=torch.float64, requires_grad=True)
    ascent = torch.optim.Adam([logits], lr=0.3)
    for _ in range(num_ascents):
        skill, skills = START, []
        for share in logits.softmax(-1):
            skill = learned(skill, share)
            skills.append(skill.mean())
        ascent.zero_grad()
        (-torch.stack(skills).mean()).backward()
        ascent.step()
    shares = logits.softmax(-1).mean(0)
    return float(shares[TO_LEARN].sum()), float(skills[-1]), float(torch.stack(skills).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mixers", nargs="+", default=list(components("mixer")))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    best = teacher(args.steps)
    print("| mixer | share to learn from | skill at the end | skill over all steps | regret |")
    print("|---|---|---|---|---|")
    print(f"| a teacher who knows | {best[0]:.3f} | {best[1]:.3f} | {best[2]:.3f} | 0 |")
    for name in sorted(args.mixers, key=lambda name: name != "static"):
        runs = [run(name, PARAMS.get(name, {}), seed, args.steps) for seed in range(args.seeds)]
        cells = [spread([each[i] for each in runs]) for i in range(3)]
        regret = spread([best[2] - each[2] for each in runs])
        label = "static (uniform)" if name == "static" else name
        print(f"| {label} | {' | '.join(cells)} | {regret} |", flush=True)


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


if __name__ == "__main__":
    main()
