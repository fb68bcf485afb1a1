"""Predictions from many threads at once: each equals the serial one to the bit, and nothing else is disturbed."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from method_table import A_THIRD, METHODS
from torch import nn

import bayeslim as bl

THREADS, SEEDS, ROUNDS = 8, 4, 2


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.norm = nn.LSTM(4, 6, batch_first=True), nn.Dropout(0.2), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.inner(x.view(-1, 2, 4))[0][:, -1])))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.layer(x.view(-1, 2, 4)).mean(1)))


def dense():
    return nn.Sequential(nn.Linear(8, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3))


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(24, 3),
    )  # fmt: skip


ARCHITECTURES = {"mlp": dense, "convolutions": convolutional, "lstm": Recurrent, "transformer": Transformer}
UNFIT = {("svgd", "lstm"), ("svgd-functions", "lstm"), ("svgd", "transformer"), ("svgd-functions", "transformer")}
"""Stein's method moves all networks under one vmap, for which torch has no rule in these."""
DRAWN_OTHERWISE = {"variational-shared", "variational-mixture", "mc-dropout", "mc-batch-norm", "mc-augmentation"}
"""Methods with a way of drawing that no method of `A_THIRD` has.

All methods are tried on the perceptron. Which weights a way of drawing gives to a layer does not depend on the layer,
so the other architectures are tried with one method of each way.
"""


def fitted(method: str, architecture: str) -> bl.Bayesian:
    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.arange(16) % 3
    bnn = bl.bayesianize(ARCHITECTURES[architecture](), METHODS[method](), likelihood=bl.likelihoods.Categorical())
    epochs = {"laplace": None, "mc-batch-norm": None, "hmc": None, "swag": 4, "multi-swag": 4, "subspace": 4}
    found = epochs.get(bnn.method.name, 2)
    options = {} if bnn.method.name == "mc-batch-norm" else {"progress": False}
    bnn.fit(bl.data.Loader(x, y, 8), seed=0, **options, **({} if found is None else {"epochs": found}))
    return bnn


def flags() -> tuple[object, ...]:
    return (
        torch.backends.mkldnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.is_grad_enabled(),
        nn.Module.__call__,
        nn.Module.__getattr__,
    )


def state_of(bnn: bl.Bayesian) -> list[object]:
    return [(id(m), m.training, *map(id, m._parameters.values()), *map(id, m._buffers.values())) for m in bnn.modules()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_eight_threads_predict_as_one_does(architecture):
    some = METHODS if architecture == "mlp" else {*A_THIRD, *DRAWN_OTHERWISE}
    names = [name for name in METHODS if name in some and (name, architecture) not in UNFIT]
    bnns = {name: fitted(name, architecture) for name in names}
    x = torch.randn(5, 8)
    ways = {name: ["auto"] + (["local"] if name.startswith("variational-l") else []) for name in names}

    def predicted(bnn, how, seed):
        found = bl.predict(bnn, x, samples=3, how=how, generator=torch.Generator().manual_seed(seed))
        return found.samples, found.mean, found.epistemic

    tasks = [(name, how, seed) for name in names for how in ways[name] for seed in range(SEEDS)]
    wanted = {task: predicted(copy.deepcopy(bnns[task[0]]), *task[1:]) for task in tasks}
    before = {name: state_of(bnn) for name, bnn in bnns.items()}
    weights = {name: {k: v.clone() for k, v in bnn.state_dict().items()} for name, bnn in bnns.items()}
    flags_before, random_before = flags(), torch.get_rng_state()
    plain = ARCHITECTURES[architecture]().eval()
    answer = plain(x)
    torch.set_rng_state(random_before)
    stop, disturbed = threading.Event(), []

    def call_a_plain_network():
        while not stop.is_set():
            with torch.no_grad():
                if not torch.allclose(plain(x), answer, atol=1e-6):
                    disturbed.append(1)
            stop.wait(0.0005)  # leaves the interpreter to the others

    other = threading.Thread(target=call_a_plain_network)
    other.start()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(ROUNDS):  # the first on cold networks, the second on warm ones
                found = list(pool.map(lambda task: predicted(bnns[task[0]], *task[1:]), tasks))
                for task, parts in zip(tasks, found, strict=True):
                    assert all(map(torch.equal, parts, wanted[task])), task
    finally:
        stop.set()
        other.join()
    assert not disturbed
    assert flags() == flags_before
    assert torch.equal(torch.get_rng_state(), random_before)
    assert {name: state_of(bnn) for name, bnn in bnns.items()} == before
    for name, bnn in bnns.items():
        assert all(torch.equal(value, weights[name][key]) for key, value in bnn.state_dict().items())


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_memory_does_not_grow_over_changing_shapes():
    bnn = fitted("deep-ensemble", "mlp")
    for k in range(1, 30):
        bl.predict(bnn, torch.randn(k, 8))
    before = tensors_alive()
    for k in range(30, 90):
        bl.predict(bnn, torch.randn(k, 8))
    assert tensors_alive() <= before


def test_networks_are_traced_in_one_thread_at_a_time(tmp_path):
    """Two traces at once fail in torch, whose tracing state belongs to all threads."""
    x = torch.randn(4, 8)

    def saved(width: int) -> bool:
        network = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)).eval()
        bl.save(network, tmp_path / str(width), example=x)
        return torch.allclose(bl.load(tmp_path / str(width))(x), network(x), atol=1e-6)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(saved, (5, 6)))
