"""The index stream: what each batch holds, that ranks share it out, and that it goes on where it stopped."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_dataflex import DomainMixtureSampler, mixture_dataloader

A, B, C = 30, 20, 10
LABELS = ["a"] * A + ["b"] * B + ["c"] * C
HALF = {"a": 0.5, "b": 0.5, "c": 0.0}


def sampler_of(batch_size=4, labels=LABELS, **options) -> DomainMixtureSampler:
    return DomainMixtureSampler(labels, batch_size, **options)


def batches(sampler: DomainMixtureSampler, labels=LABELS) -> list[Counter]:
    rows = list(sampler)
    return [
        Counter(labels[i] for i in rows[k : k + sampler.batch_size]) for k in range(0, len(rows), sampler.batch_size)
    ]


def taken(sampler: DomainMixtureSampler, num: int) -> list[int]:
    return list(itertools.islice(sampler, num))


def test_R047_every_batch_has_the_proportions():
    assert batches(sampler_of(proportions=HALF)) == [Counter(a=2, b=2)] * 15


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(1, 11))
@settings(max_examples=40, deadline=None)
def test_a_batch_is_less_than_two_prompts_from_the_proportions(weights, batch_size):
    shares = dict(zip("abc", (w / sum(weights) for w in weights)))
    sampler = sampler_of(batch_size, proportions=shares)
    for counts in batches(sampler)[:-1]:
        for name, share in shares.items():
            assert abs(counts[name] - share * batch_size) < 2


@given(st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_many_batches_have_the_proportions_also_those_that_are_less_than_a_prompt(weights, batch_size):
    shares = dict(zip("abc", (w / sum(weights) for w in weights)))
    totals = Counter()
    for n, counts in enumerate(batches(sampler_of(batch_size, proportions=shares, num_samples=60 * batch_size)), 1):
        totals += counts
        for name, share in shares.items():
            assert abs(totals[name] - share * batch_size * n) < 2


def test_ties_take_turns():
    thirds = dict.fromkeys("abc", 1 / 3)
    totals = sum(batches(sampler_of(4, proportions=thirds, num_samples=36)), Counter())
    assert set(totals.values()) == {12}


def test_multinomial_draws_have_the_proportions_on_average():
    counts = batches(sampler_of(10, proportions={"a": 0.2, "b": 0.3, "c": 0.5}, draw="multinomial", num_samples=20_000))
    mean = [np.mean([each[name] for each in counts]) for name in "abc"]
    np.testing.assert_allclose(mean, [2, 3, 5], atol=0.15)
    assert np.var([each["c"] for each in counts]) == pytest.approx(2.5, rel=0.15)


def test_the_next_batch_follows_new_proportions():
    sampler = sampler_of(proportions={"a": 1.0})
    stream = iter(sampler)
    assert {LABELS[next(stream)] for _ in range(4)} == {"a"}
    sampler.set_proportions({"b": 1.0})
    assert {LABELS[next(stream)] for _ in range(4)} == {"b"}


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, None), (1, 2), (2, 2), (2, 3)])
def test_R050_the_lag_is_what_the_workers_have_drawn_ahead(num_workers, prefetch):
    loader = mixture_dataloader(
        [{"domain": label} for label in LABELS], 2, proportions={"a": 1.0, "b": 0.0, "c": 0.0}, num_workers=num_workers,
        prefetch_factor=prefetch,
    )  # fmt: skip
    stream = iter(loader)
    next(stream)
    lag = loader.sampler.num_batches - 1
    assert lag == num_workers * (prefetch or 0)
    loader.sampler.set_proportions({"b": 1.0})
    seen = [set(next(stream)["domain"]) for _ in range(lag + 2)]
    assert seen == [{"a"}] * lag + [{"b"}] * 2


def test_with_replacement_a_domain_starts_anew_in_another_order():
    rows = list(sampler_of(5, proportions={"c": 1.0}, num_samples=30))
    rounds = [rows[:10], rows[10:20], rows[20:]]
    assert all(sorted(each) == list(range(A + B, A + B + C)) for each in rounds)
    # By their first halves, because a batch is shuffled anyway.
    halves = [set(each[:5]) for each in rounds]
    assert halves[0] != halves[1] != halves[2]


def test_the_domains_of_a_batch_are_shuffled():
    rows = list(sampler_of(10, proportions=HALF))
    orders = {tuple(LABELS[row] for row in rows[i : i + 10]) for i in range(0, 60, 10)}
    assert len(orders) == 6


def test_without_replacement_a_used_up_domains_share_goes_to_the_others_in_proportion():
    sampler = sampler_of(10, proportions={"a": 0.4, "b": 0.2, "c": 0.4}, replacement=False)
    with pytest.warns(UserWarning, match="The domains c have no prompts left in this epoch") as caught:
        counts = batches(sampler)
    assert len(caught) == 1
    assert counts[:2] == [Counter(a=4, b=2, c=4)] * 2
    assert counts[2] == Counter(a=5, b=3, c=2)  # 2 of c are left; 2 more at 0.4 to 0.2
    assert counts[3]["a"] + counts[3]["b"] == 10
    assert sum(counts, Counter()) == Counter(a=A, b=B, c=C)


def test_a_domain_without_prompts_gives_its_share_away():
    sampler = sampler_of(6, proportions={"a": 0.25, "b": 0.25, "d": 0.5}, domains=["a", "b", "c", "d"])
    with pytest.warns(UserWarning, match="domains d have no prompts"):
        assert batches(sampler)[0] == Counter(a=3, b=3)


def test_small_proportions_come_up_beside_a_domain_without_prompts():
    labels = ["a"] * 50 + ["b"] * 50
    shares = {"a": 0.45, "b": 0.05, "c": 0.5}
    sampler = DomainMixtureSampler(labels, 4, domains=["a", "b", "c"], proportions=shares, num_samples=400)
    with pytest.warns(UserWarning, match="domains c have no prompts left.*Leave them out"):
        assert sum(batches(sampler, labels), Counter()) == Counter(a=360, b=40)


def test_small_proportions_come_up_in_short_epochs():
    labels = ["a"] * 50 + ["b"] * 50
    sampler = DomainMixtureSampler(labels, 4, proportions={"a": 0.95, "b": 0.05}, num_samples=8)
    assert sum((sum(batches(sampler, labels), Counter()) for _ in range(100)), Counter()) == Counter(a=760, b=40)


def test_an_epoch_is_as_long_as_announced_though_its_domains_run_out():
    sampler = sampler_of(4, proportions=dict.fromkeys("abc", 1 / 3), replacement=False)
    stream = iter(sampler)
    first = [next(stream) for _ in range(4)]
    sampler.set_proportions({"c": 1.0})
    with pytest.warns(UserWarning, match="domains c have no prompts left"):
        rest = list(stream)
    assert len(first + rest) == len(set(first + rest)) == len(sampler) == 60


def test_a_second_iteration_does_not_end_the_first_unseen():
    sampler = sampler_of()
    stream = iter(sampler)
    next(stream)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="iterated over again while an epoch was under way"):
        list(stream)


def test_labels_are_their_text():
    labels = [torch.tensor(0), np.int64(1), 1, "1", 0]
    assert [rows.tolist() for rows in DomainMixtureSampler(labels, 1).rows] == [[0, 4], [1, 2, 3]]


@pytest.mark.parametrize("replacement", [True, False])
def test_R045_an_epoch_ends_with_a_proportion_of_zero(replacement):
    labels = ["a"] * 4 + ["b"] * 4
    sampler = DomainMixtureSampler(labels, 2, proportions={"a": 1.0, "b": 0.0}, replacement=replacement)
    rows = list(sampler)
    assert set(rows) == {0, 1, 2, 3}
    assert len(rows) == len(sampler) == (8 if replacement else 4)


def test_R046_more_prompts_than_a_multinomial_takes():
    labels = np.zeros(2**24 + 1, dtype=np.int8)
    labels[2**23 :] = 1
    rows = taken(DomainMixtureSampler(labels, 4, proportions=[0.5, 0.5]), 4)
    assert sorted(labels[rows].tolist()) == [0, 0, 1, 1]


def test_R044_proportions_in_single_precision_are_taken():
    given = torch.tensor([0.1, 0.2, 0.3, 0.4]).tolist()
    sampler = DomainMixtureSampler(list("abcd") * 5, 10, proportions=given)
    shares = list(sampler.proportions.values())
    assert sum(given) != 1
    assert abs(sum(shares) - 1) < 1e-12
    assert np.random.default_rng(0).choice(4, p=shares) in range(4)
    assert Counter("abcd"[i % 4] for i in taken(sampler, 10)) == Counter(a=1, b=2, c=3, d=4)


def test_R040_every_rank_gets_as_many_prompts_and_none_gets_nothing():
    labels = ["a"] * 10
    ranks = [list(DomainMixtureSampler(labels, 1, num_replicas=6, rank=rank)) for rank in range(6)]
    assert [len(rows) for rows in ranks] == [1] * 6
    assert len({row for rows in ranks for row in rows}) == 6
    with pytest.raises(ValueError, match="An epoch of 10 prompts is none for each of 11 ranks"):
        DomainMixtureSampler(labels, 1, num_replicas=11, rank=0)


@pytest.mark.parametrize("num_samples", [60, 59, 47])
@pytest.mark.parametrize("world", [2, 3])
def test_R049_ranks_share_out_one_stream(world, num_samples):
    alone = list(sampler_of(2 * world, num_samples=num_samples // world * world, seed=7))
    options = {"num_samples": num_samples, "seed": 7, "num_replicas": world}
    ranks = [list(sampler_of(2, rank=rank, **options)) for rank in range(world)]
    assert len({len(rows) for rows in ranks}) == 1
    assert sorted(row for rows in ranks for row in rows) == sorted(alone)
    assert all(len(rows) == len(sampler_of(2, rank=0, **options)) for rows in ranks)
    dealt = [rows[i : i + 2] for i in range(0, len(ranks[0]), 2) for rows in ranks]
    for k, start in enumerate(range(0, len(alone), 2 * world)):
        together = [row for rows in dealt[k * world : (k + 1) * world] for row in rows]
        assert sorted(together) == sorted(alone[start : start + 2 * world])


def test_R051_epochs_differ_and_come_again():
    sampler, twin = sampler_of(), sampler_of()
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [list(twin) for _ in range(3)] == epochs
    twin.set_epoch(1)
    assert list(twin) == epochs[1]
    assert list(sampler_of(seed=1)) != epochs[0]


def test_the_global_generators_are_left_alone():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), pickle.dumps(np.random.get_state())  # noqa: NPY002
    list(sampler_of())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert pickle.dumps(np.random.get_state()) == before[1]  # noqa: NPY002


# -- stop and resume ---------------------------------------------------------------------------------------------------


def steered(sampler: DomainMixtureSampler, start: int, stop: int, num_ahead: int, stream=None) -> tuple[list, object]:
    """Train on batches start..stop of an epoch while `num_ahead` are drawn ahead; the proportions change at each."""
    stream = iter(sampler) if stream is None else stream
    drawn: list[list[int]] = []
    seen = []
    for step in range(start, stop):
        while len(drawn) < num_ahead + 1 and (batch := taken_batch(stream, sampler.batch_size)):
            drawn.append(batch)
        seen.append(drawn.pop(0))
        sampler.set_proportions(dict(zip("abc", np.roll([0.6, 0.3, 0.1], step))))
    return seen, stream


def taken_batch(stream, size: int) -> list[int]:
    return list(itertools.islice(stream, size))


@pytest.mark.parametrize("num_ahead", [0, 1, 4])
@pytest.mark.parametrize("stop", [1, 5, 14, 15])
@pytest.mark.parametrize("options", [{}, {"replacement": False}, {"draw": "multinomial"}], ids=str)
@pytest.mark.filterwarnings("ignore:The domains")
def test_law_8_a_resumed_epoch_goes_on_as_one_without_a_stop(stop, num_ahead, options):
    whole = sampler_of(seed=3, **options)
    expected, _ = steered(whole, 0, 15, num_ahead)
    following = list(whole)

    stopped = sampler_of(seed=3, **options)
    steered(stopped, 0, stop, num_ahead)
    state = pickle.loads(pickle.dumps(stopped.state_dict(stop)))
    resumed = sampler_of(seed=3, **options)
    resumed.load_state_dict(state)
    if stop < 15:
        seen, _ = steered(resumed, stop, 15, num_ahead)
        assert seen == expected[stop:]
    assert list(resumed) == following


def test_R052_a_state_of_the_end_of_an_epoch_starts_the_next():
    whole = DomainMixtureSampler(["a"] * 5 + ["b"] * 5, 5)
    epochs = [list(whole) for _ in range(3)]
    stopped = DomainMixtureSampler(["a"] * 5 + ["b"] * 5, 5)
    list(stopped)
    resumed = DomainMixtureSampler(["a"] * 5 + ["b"] * 5, 5)
    resumed.load_state_dict(stopped.state_dict())
    assert [list(resumed), list(resumed)] == epochs[1:]


def test_R053_only_the_interrupted_epoch_is_shorter():
    stopped = sampler_of(2)
    taken(stopped, 52)
    resumed = sampler_of(2)
    resumed.load_state_dict(stopped.state_dict())
    assert [len(list(resumed)) for _ in range(3)] == [8, 60, 60]
    assert len(resumed) == 60


def test_R056_draws_of_a_restored_state_are_those_of_the_run():
    whole = taken(sampler_of(2), 10)
    stopped = sampler_of(2)
    first = taken(stopped, 4)
    resumed = sampler_of(2)
    resumed.load_state_dict(stopped.state_dict())
    assert first + taken(resumed, 6) == whole


def test_a_state_is_what_a_checkpoint_can_hold(tmp_path):
    sampler = sampler_of()
    taken(sampler, 8)
    torch.save(sampler.state_dict(1), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == sampler.state_dict(1)


def test_a_state_of_other_domains_is_matched_by_name():
    saved = sampler_of(proportions={"a": 0.6, "b": 0.2, "c": 0.2})
    taken(saved, 8)
    other = DomainMixtureSampler(["b"] * 10 + ["d"] * 10 + ["c"] * 10, 4)
    other.load_state_dict(saved.state_dict())
    assert other.proportions == pytest.approx({"b": 1 / 3, "c": 1 / 3, "d": 1 / 3})
    assert len(list(other)) == 30 - 8


def test_states_do_not_grow():
    sampler = sampler_of(1, num_samples=20_000)
    sizes = []
    for i, _ in enumerate(sampler):
        sampler.forget_before(i)
        if i in (100, 19_000):
            sizes.append(len(pickle.dumps(sampler.state_dict(i))))
    assert abs(sizes[1] - sizes[0]) < 20


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": []}, "There are no prompts"),
        ({"labels": ["a", "None", None]}, "The domain of prompt 2 is None. Give every prompt its domain"),
        ({"labels": np.array(["a", float("nan"), "c"], dtype=object)}, "The domain of prompt 1 is nan"),
        ({"domains": ["a", "a", "b", "c"]}, "names one twice"),
        ({"num_replicas": 2}, "Give both or neither"),
        ({"seed": -1}, "seed is -1"),
        ({"domains": ["a", "b"]}, "prompts of the domains c, which are none of a, b"),
        ({"proportions": {"a": 0.5, "b": 0.4}}, "Give numbers >= 0 that sum to 1"),
        ({"proportions": {"a": 1.5, "b": -0.5}}, "Give numbers >= 0"),
        ({"proportions": {"a": 0.0}}, "Give numbers >= 0 that sum to 1"),
        ({"proportions": {"x": 1.0}}, "for the domains a, b, c"),
        ({"proportions": {"d": 1.0}, "domains": ["a", "b", "c", "d"]}, "all of domains without prompts"),
        ({"proportions": [0.5, 0.5]}, "2 proportions for 3 domains"),
        ({"draw": "random"}, "draw is 'random'. Use one of largest_remainder, multinomial"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_samples": 1, "num_replicas": 2, "rank": 0}, "An epoch of 1 prompts is none for each of 2 ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sampler_of(**options)


def test_a_dataset_without_the_column_is_refused():
    with pytest.raises(ValueError, match=r"The dataset has no column 'domain'\. It has: text\. Give domain_key"):
        mixture_dataloader([{"text": "x"}], 1)


class Columns:
    """As a Hugging Face dataset: by row, and by column at once."""

    column_names = ["text", "source"]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, key):
        column = ["math", "math", "math", "code", "code", "code"]
        return column if key == "source" else {"text": "x", "source": column[key]}


def test_a_dataset_of_columns_is_read_by_column():
    loader = mixture_dataloader(Columns(), 2, domain_key="source", proportions={"math": 0.5, "code": 0.5})
    assert isinstance(loader, DataLoader)
    assert [sorted(batch["source"]) for batch in loader] == [["code", "math"]] * 3
    with pytest.raises(ValueError, match="It has: text, source"):
        mixture_dataloader(Columns(), 2)


def test_nothing_is_warned_of_where_nothing_is_used_up():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(sampler_of())
        list(sampler_of(replacement=False))
