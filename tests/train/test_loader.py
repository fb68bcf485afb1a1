"""The in-memory loader: every example once, the same order when resumed, disjoint parts for the ranks."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.app.data import Loader
from bayeslim.errors import ShapeMismatch
from bayeslim.types import batch_size, split_batch

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)


def targets(loader: Loader) -> list[int]:
    return [int(y) for _, batch in loader for y in batch]


def test_batches_pair_rows_with_their_targets():
    loader = Loader(X, Y, batch_size=4)
    batches = list(loader)
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert len(loader) == 3
    assert len(loader.dataset) == 10
    for x, y in batches:
        torch.testing.assert_close(x, X[y])
    assert repr(loader) == "Loader: 10 examples in 3 batches of 4"


def test_every_epoch_has_its_own_order_and_every_example():
    loader = Loader(X, Y, batch_size=3)
    first, second = targets(loader), targets(loader)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert targets(Loader(X, Y, batch_size=3)) == first
    assert targets(Loader(X, Y, batch_size=3, seed=1)) not in (first, second)


def test_in_order_the_batches_are_views():
    loader = Loader(X, Y, batch_size=4, shuffle=False)
    assert targets(loader) == list(range(10))
    x, _ = next(iter(loader))
    assert x.data_ptr() == X.data_ptr()


def test_drop_last():
    assert [len(y) for _, y in Loader(X, Y, batch_size=4, drop_last=True)] == [4, 4]
    assert [len(y) for _, y in Loader(X, Y, batch_size=4, drop_last=True, shuffle=False)] == [4, 4]
    assert len(Loader(X, Y, batch_size=5, drop_last=True)) == 2
    assert list(Loader(X, Y, batch_size=11, drop_last=True)) == []


def test_tuples_and_dicts_of_inputs():
    for inputs in ((X, -X), [X, -X], {"a": X, "b": -X}):
        for batch in Loader(inputs, Y, batch_size=4):
            got, y = split_batch(batch)
            a, b = got.values() if isinstance(got, dict) else got
            torch.testing.assert_close(a, X[y])
            torch.testing.assert_close(b, -X[y])
            assert batch_size(got) == len(y)
            assert isinstance(got, dict) == isinstance(inputs, dict)


def test_a_resumed_run_sees_the_same_order():
    loader = Loader(X, Y, batch_size=3, seed=7)
    targets(loader)
    saved = json.loads(json.dumps(loader.state_dict()))
    expected = [targets(loader), targets(loader)]
    resumed = Loader(X, Y, batch_size=3)
    resumed.load_state_dict(saved)
    assert [targets(resumed), targets(resumed)] == expected


def test_a_loop_that_stops_early_goes_on_to_the_next_order():
    loader = Loader(X, Y, batch_size=3)
    next(iter(loader))
    other = Loader(X, Y, batch_size=3)
    targets(other)
    assert targets(loader) == targets(other)


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    targets(Loader(X, Y))
    torch.testing.assert_close(torch.rand(3), expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_ranks_share_one_order_in_equal_disjoint_parts(count, world_size, size, shuffle, seed):
    if count < world_size:
        count = world_size
    y = torch.arange(count)
    parts = [Loader(y, y, size, shuffle, seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = [targets(loader) for loader in parts]
    assert {len(s) for s in seen} == {count // world_size}
    assert {len(loader) for loader in parts} == {-(-(count // world_size) // size)}
    together = [y for s in seen for y in s]
    assert len(set(together)) == len(together)
    whole = targets(Loader(y, y, size, shuffle, seed=seed))
    assert set(together) == set(whole[: len(together)])


def test_the_device_holds_the_data_once():
    loader = Loader(X, Y, device="meta", shuffle=False)
    assert loader.dataset.x.device.type == "meta"
    assert Loader(X, Y).dataset.x is X


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: Loader(X, Y[:9]), ShapeMismatch, r"targets, 9. Got inputs with \[10\] rows"),
        (lambda: Loader((X, X[:3]), Y), ShapeMismatch, r"\[10, 3\] rows"),
        (lambda: Loader(("text", X), Y), ShapeMismatch, r"Got str"),
        (lambda: Loader({}, Y), ShapeMismatch, r"\[\] rows"),
        (lambda: Loader(X, Y, batch_size=0), ValueError, r"at least 1"),
        (lambda: Loader(X, Y, rank=2, world_size=2), ValueError, r"rank=2, world_size=2"),
        (lambda: Loader(X, Y, world_size=11), ValueError, r"11 processes cannot share 10"),
    ],
)
def test_what_does_not_fit_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        make()
