"""A run that is killed and started again ends bit for bit where it would have ended."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import bayeslim as bl
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io import storage
from processes import exit_code_of

SEED = 5
EPOCHS = 4


class Augmented(Dataset):
    """Draws from Python's and numpy's generators for every example, as augmentations do."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(24, 5, generator=generator), torch.arange(24) % 3

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i] + 0.01 * random.random() + 0.01 * np.random.rand(), self.y[i]  # noqa: NPY002


def network() -> bl.Bayesian:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    method = bl.Variational(kl_schedule=bl.schedules.Warmup(end=3))
    return bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())


def data(kind: str):
    examples = Augmented()
    if kind == "Loader":
        return bl.data.Loader(examples.x, examples.y, batch_size=6, shuffle=True, seed=3)
    generator = torch.Generator().manual_seed(9) if kind == "DataLoader with a generator" else None
    return DataLoader(examples, batch_size=6, shuffle=True, generator=generator)


class Stop(BaseException):
    """An interruption of a run, like Ctrl-C."""


def train(
    kind: str, checkpoint: Path | None, killed_at: int | None = None, stopped_in: int | None = None
) -> tuple[bl.Bayesian, bl.Fit]:
    """Train; killed at a step, or stopped at the end of an epoch before its checkpoint."""
    bnn, held_out = network(), Augmented()
    optimizer = bnn.optimizer(1e-2)

    def kill(*_):
        if bnn.step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def stop(epoch):
        if epoch.number == stopped_in:
            raise Stop

    optimizer.register_step_pre_hook(kill)
    fit = bnn.fit(
        data(kind), epochs=EPOCHS, lr_schedule="cosine", optimizer=optimizer, seed=SEED, checkpoint=checkpoint,
        validate=[(held_out.x, held_out.y)], patience=10, clip=5.0, callbacks=[stop],
    )  # fmt: skip
    return bnn, fit


def train_in_one_thread(*args) -> None:
    torch.set_num_threads(1)
    train(*args)


def assert_same_end(first: tuple[bl.Bayesian, bl.Fit], second: tuple[bl.Bayesian, bl.Fit]) -> None:
    one, other = first[0].state_dict(), second[0].state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert first[0].step == second[0].step
    assert first[1].history == second[1].history
    assert first[1].best_epoch == second[1].best_epoch


@pytest.mark.parametrize("kind", ["DataLoader", "Loader"])
def test_killed_in_the_middle_of_an_epoch(kind, tmp_path):
    assert exit_code_of(train_in_one_thread, kind, tmp_path / "run", 10) == -signal.SIGKILL
    resumed = train(kind, tmp_path / "run")
    assert resumed[1].resumed_from == 2
    assert_same_end(resumed, train(kind, None))


@pytest.mark.parametrize("kind", ["DataLoader", "DataLoader with a generator", "Loader"])
def test_stopped_in_every_epoch(kind, tmp_path):
    for epoch in range(1, EPOCHS + 1):
        with pytest.raises(Stop):
            train(kind, tmp_path, stopped_in=epoch)
        random.random()
        torch.rand(7)
    resumed = train(kind, tmp_path)
    assert resumed[1].resumed_from == EPOCHS - 1
    assert_same_end(resumed, train(kind, None))


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train("Loader", tmp_path)
    second = train("Loader", tmp_path)
    assert second[1].resumed_from == EPOCHS
    assert_same_end(first, second)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"epochs": 9}, "epochs"),
        ({"lr": 0.5}, "learning rate"),
        ({"accumulate": 2}, "accumulate"),
        ({"clip": 0.1}, "clip"),
        ({"batch_size": 12}, "batches"),
        ({"prior": bl.priors.Normal(0.1)}, "priors"),
        ({"method": bl.Variational(samples=2)}, "method"),
        ({"moved": 1}, "data"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(options, what, tmp_path):
    def fit(epochs=2, batch_size=6, prior=None, method=None, moved=0, **rest):
        model = nn.Linear(5, 3)
        likelihood = bl.likelihoods.Categorical()
        bnn = bl.bayesianize(model, method or bl.Variational(), likelihood=likelihood, prior=prior)
        before = copy.deepcopy(bnn.state_dict())
        examples = Augmented()
        try:
            batches = bl.data.Loader(examples.x, (examples.y + moved) % 3, batch_size=batch_size)
            bnn.fit(batches, epochs=epochs, checkpoint=tmp_path, **rest)
        except BayeslimError:
            assert all(torch.equal(before[k], v) for k, v in bnn.state_dict().items())
            raise

    fit()
    with pytest.raises(BayeslimError, match=f"a checkpoint of another run: its {what} differs"):
        fit(**options)


def damage(folder: Path, change) -> None:
    index = json.loads((folder / storage.INDEX).read_text())
    change(index["config"])
    (folder / storage.INDEX).write_text(json.dumps(storage.sealed(index)))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("optimizer"),
        lambda c: c.pop("random"),
        lambda c: c.update(random=[]),
        lambda c: c["random"][0]["$dict"].pop(0),
        lambda c: c["random"][0]["$dict"].pop(1),
        lambda c: c["random"][0]["$dict"][0][1].update({"$tensor": "nowhere"}),
        lambda c: c["random"][0]["$dict"][0][1].update({"$tensor": "network:0.weight"}),
        lambda c: c["optimizer"]["$dict"].pop(1),
        lambda c: c["optimizer"].update({"$dict": 3}),
        lambda c: c["optimizer"].update({"$dict": [[1, 2, 3]]}),
        lambda c: c.update(history=[3]),
        lambda c: c.update(step="many"),
        lambda c: c.update(best_value=None),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(change, tmp_path):
    train("Loader", tmp_path)
    damage(tmp_path, change)
    bnn, held_out = network(), Augmented()
    optimizer = bnn.optimizer(1e-2)
    before, state = copy.deepcopy(bnn.state_dict()), copy.deepcopy(optimizer.state_dict())
    generators = torch.get_rng_state(), random.getstate()
    with pytest.raises(CorruptFile, match="not a complete checkpoint"):
        bnn.fit(
            data("Loader"), epochs=EPOCHS, optimizer=optimizer, checkpoint=tmp_path, clip=5.0,
            validate=[(held_out.x, held_out.y)], patience=10,
        )  # fmt: skip
    assert all(torch.equal(before[k], v) for k, v in bnn.state_dict().items())
    assert optimizer.state_dict()["state"] == state["state"] == {}
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert bnn.step == 0


def test_a_saved_network_is_no_checkpoint(tmp_path):
    bl.save(network(), tmp_path)
    with pytest.raises(CorruptFile, match="holds a 'bayesian'; needed checkpoint"):
        network().fit(data("Loader"), checkpoint=tmp_path)


def test_a_checkpoint_of_another_network_names_its_folder(tmp_path):
    batches = [(torch.randn(4, 3), torch.zeros(4).long())]
    for hidden, words in ((5, None), (6, rf"which was to go on from {tmp_path}")):
        model = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2))
        bnn = bl.bayesianize(model, bl.SWA(), likelihood=bl.likelihoods.Categorical())
        if words is None:
            bnn.fit(batches, epochs=1, checkpoint=tmp_path, progress=False)
        else:
            with pytest.raises(CorruptFile, match=words):
                bnn.fit(batches, epochs=1, checkpoint=tmp_path, progress=False)


def test_what_cannot_be_saved_is_found_out_before_training(tmp_path):
    class Own(bl.likelihoods.Categorical):
        pass

    bnn = bl.bayesianize(nn.Linear(5, 3), bl.Variational(), likelihood=Own())
    with pytest.raises(BayeslimError, match="Own cannot be saved"):
        bnn.fit(data("Loader"), checkpoint=tmp_path)
    assert bnn.step == 0
