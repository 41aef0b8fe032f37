"""The policy loss and its gradient against the closed form in NumPy float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from lightning_dataflex.functional.loss import loss_denominator, policy_loss, token_kl, token_scale

AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
LENGTHS = np.array([5, 3, 0, 1, 4])
MASK = np.arange(5)[None] < LENGTHS[:, None]


def tables(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=MASK.shape)
    return {
        "log_probs": old + rng.normal(scale=0.4, size=MASK.shape),
        "old_log_probs": old,
        "advantages": rng.normal(size=MASK.shape),
        "ref_log_probs": old + rng.normal(scale=0.4, size=MASK.shape),
        "entropies": rng.exponential(size=MASK.shape),
        "rollout_is_weights": rng.exponential(size=MASK.shape) * rng.integers(0, 2, size=MASK.shape),
    }


def closed_form(x, mask, aggregation, *, low=0.2, high=0.2, kl=0.0, estimator="k3", entropy=0.0):
    """Loss and its derivatives by log_probs and entropies, token by token."""
    lengths = mask.sum(-1)
    num = mask.sum() if aggregation == "token-mean" else (lengths > 0).sum()
    total, by_log_probs, by_entropies = 0.0, np.zeros(mask.shape), np.zeros(mask.shape)
    for n, t in zip(*np.nonzero(mask)):
        share = 1 / num / (lengths[n] if aggregation == "seq-mean-token-mean" else 1)
        a, w = x["advantages"][n, t], x["rollout_is_weights"][n, t]
        ratio = np.exp(x["log_probs"][n, t] - x["old_log_probs"][n, t])
        clips = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
        r = x["log_probs"][n, t] - x["ref_log_probs"][n, t]
        values = {"k1": (r, 1), "k2": (r * r / 2, r), "k3": (np.exp(-r) - 1 + r, 1 - np.exp(-r))}
        value, slope = values[estimator]
        policy = -a * w * (np.clip(ratio, 1 - low, 1 + high) if clips else ratio)
        total += share * (policy + kl * value - entropy * x["entropies"][n, t])
        by_log_probs[n, t] = share * ((0 if clips else -a * w * ratio) + kl * slope)
        by_entropies[n, t] = -share * entropy
    return total, by_log_probs, by_entropies


def measured(x, mask, **settings):
    leaves = {k: torch.tensor(x[k], requires_grad=True) for k in ("log_probs", "entropies")}
    rest = {k: torch.tensor(v) for k, v in x.items() if k not in leaves}
    out = policy_loss(**leaves, **rest, response_mask=torch.tensor(mask), **settings)
    out.loss.backward()
    grads = [torch.zeros(mask.shape) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    return out, *grads


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("kl", "estimator", "entropy"), [(0, "k3", 0), (0.1, "k1", 0), (0.1, "k2", 0.01), (0.1, "k3", 0.01)]
)
def test_loss_and_gradient_are_the_closed_form(aggregation, kl, estimator, entropy):
    x = tables()
    dirt = np.where(MASK, 0, np.nan)
    expected = closed_form(x, MASK, aggregation, low=0.2, high=0.28, kl=kl, estimator=estimator, entropy=entropy)
    out, *grads = measured(
        {k: v + dirt for k, v in x.items()},
        MASK,
        aggregation=aggregation,
        clip_high=0.28,
        kl_coef=kl,
        kl_estimator=estimator,
        entropy_coef=entropy,
    )
    for got, want in zip((out.loss.detach(), *grads), expected):
        np.testing.assert_allclose(got, want, atol=1e-7)


def test_the_parts_add_up_to_the_loss_and_carry_no_gradient():
    out, *_ = measured(tables(), MASK, kl_coef=0.5, entropy_coef=0.25)
    parts = out.parts
    torch.testing.assert_close(parts["policy"] + 0.5 * parts["kl"] - 0.25 * parts["entropy"], out.loss.detach())
    assert not any(part.requires_grad for part in parts.values())


def test_weights_get_no_gradient():
    x = {name: torch.tensor(value, requires_grad=True) for name, value in tables().items()}
    policy_loss(**x, response_mask=torch.tensor(MASK)).loss.backward()
    assert x["rollout_is_weights"].grad is None
    assert x["log_probs"].grad is not None


def test_the_clip_fraction_counts_the_clipped_tokens():
    x = tables()
    ratio = np.exp(x["log_probs"] - x["old_log_probs"])
    clipped = np.where(x["advantages"] > 0, ratio > 1.2, ratio < 0.8)
    counted = MASK & (x["rollout_is_weights"] > 0)
    out, *_ = measured(x, MASK)
    assert out.parts["clipped"].item() == pytest.approx((clipped & counted).sum() / MASK.sum())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cuts", [[1], [2, 3], [1, 2, 3, 4]])
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(aggregation, cuts):
    x = tables(1)
    _, whole, _ = measured(x, MASK, aggregation=aggregation)
    denominator = loss_denominator(torch.tensor(MASK), aggregation)
    pieces = []
    for rows in np.split(np.arange(len(MASK)), cuts):
        piece = {k: v[rows] for k, v in x.items()}
        pieces.append(measured(piece, MASK[rows], aggregation=aggregation, denominator=denominator)[1])
    torch.testing.assert_close(torch.cat(pieces), whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_advantage_per_sample_is_that_of_each_of_its_tokens(aggregation):
    x = tables(2)
    x["advantages"] = np.repeat(x["advantages"][:, :1], 5, axis=1)
    per_token, grad, _ = measured(x, MASK, aggregation=aggregation)
    per_sample, same, _ = measured(x | {"advantages": x["advantages"][:, 0]}, MASK, aggregation=aggregation)
    torch.testing.assert_close(per_sample.loss, per_token.loss)
    torch.testing.assert_close(same, grad)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("response_mask", (5,)),
        ("old_log_probs", (5,)),
        ("old_log_probs", (1, 5)),
        ("advantages", (1,)),
        ("advantages", (1, 5)),
        ("rollout_is_weights", (1,)),
        ("rollout_is_weights", ()),
    ],
)
def test_what_broadcasting_would_make_another_loss_of_is_refused(name, shape):
    given = {key: torch.tensor(value) for key, value in tables().items()} | {"response_mask": torch.tensor(MASK)}
    with pytest.raises(ValueError, match=rf"^{name} has shape {re.escape(str(shape))} beside log_probs \(5, 5\)\."):
        policy_loss(**given | {name: torch.ones(shape)})


def test_a_rank_without_samples_need_not_know_the_length_of_others():
    log_probs = torch.zeros(0, 7, requires_grad=True)
    loss = policy_loss(log_probs, torch.zeros(0, 7), torch.zeros(0), torch.zeros(0, 1)).loss
    assert (loss.item(), loss.requires_grad) == (0, True)


@pytest.mark.parametrize("rows", [4, 5])
def test_a_weight_per_sample_is_that_of_each_of_its_tokens(rows):
    # Of as many samples as tokens, too, where it would pass for a weight per token.
    x = {name: value[:rows] for name, value in tables(3).items()}
    per_token = np.repeat([[0.0], [0.5], [2.0], [1.5], [3.0]], 5, axis=1)[:rows]
    expected, by_log_probs, _ = closed_form(x | {"rollout_is_weights": per_token}, MASK[:rows], "token-mean")
    out, grad, _ = measured(x | {"rollout_is_weights": per_token[:, 0]}, MASK[:rows])
    np.testing.assert_allclose(out.loss.detach(), expected, atol=1e-7)
    np.testing.assert_allclose(grad, by_log_probs, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_half_precision_inputs_are_computed_in_float32(aggregation, dtype):
    x = {k: torch.tensor(v).to(dtype) for k, v in tables().items()}
    mask = torch.tensor(MASK)
    settings = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}
    half = policy_loss(**x, response_mask=mask.to(dtype), **settings)
    full = policy_loss(**{k: v.double() for k, v in x.items()}, response_mask=mask, **settings)
    assert half.loss.dtype == torch.float32
    torch.testing.assert_close(half.loss.double(), full.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_large_log_ratio_stays_finite(dtype):
    log_probs = torch.tensor([[-1.0, -60.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-60.0, -1.0]], dtype=dtype)
    out = policy_loss(log_probs, old, torch.tensor([-1.0]), torch.ones(1, 2), ref_log_probs=old, kl_coef=0.1)
    out.loss.backward()
    assert out.loss.isfinite()
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("length", [257, 301, 4097])
def test_long_responses_are_counted_exactly_in_a_half_precision_mask(length):
    mask = torch.ones(1, length, dtype=torch.bfloat16)
    assert token_scale(mask, "seq-mean-token-mean").item() == pytest.approx(1 / length, rel=1e-6)
    assert loss_denominator(mask, "token-mean").item() == length


def test_an_empty_response_has_a_finite_scale():
    np.testing.assert_allclose(
        token_scale(torch.tensor(MASK), "seq-mean-token-mean")[:, 0], [1 / 5, 1 / 3, 1, 1, 1 / 4], rtol=1e-6
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_average_to_the_divergence(estimator):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.33, 0.22])
    log_ratio = torch.tensor(np.log(p / q))
    expectation = (torch.tensor(p) * token_kl(log_ratio, estimator)).sum().item()
    # k2 is biased, by an amount of third order in the distance.
    assert expectation == pytest.approx((p * np.log(p / q)).sum(), rel=0.05 if estimator == "k2" else 1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "token_mean"}, "'token_mean'.*token-mean"),
        ({"kl_coef": 0.1}, "kl_coef is 0.1.*ref_log_probs"),
        ({"entropy_coef": 0.1}, "entropy_coef is 0.1.*entropies"),
        ({"kl_coef": 0.1, "ref_log_probs": torch.zeros(1, 2), "kl_estimator": "k4"}, "'k4'.*k1, k2, k3"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        policy_loss(zeros, zeros, zeros, zeros + 1, **settings)
