"""The measurements of the benchmark suite: step, fit, prediction and memory of every method and every peer.

`python -m benchmarks` runs them. Contenders take turns in one process: every round times each of them in a new order,
and a ratio to the plain network is taken within its round (`steps.py`). A contender that fails is reported with the
reason, and the others go on.

A step is loss, gradients and update on a batch of 128, as `fit` makes it: replayed as a CUDA graph on a GPU. A fit is
`bnn.fit` with its defaults for two epochs of minibatches of 64, with the conversion of the network. A prediction is
`bl.predict`, with 32 networks where the posterior can be sampled, and its own number where it is a set of networks.
Memory is the peak of live tensors in a fit, the network included; for peers, which leave the fit to their user, in two
steps on minibatches of 64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from contenders import NUM_DATA, PEERS, PLAIN, SAMPLES, Batch, Contender, plain
from environment import versions
from steps import Times, summary, take_turns
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.export.memory import LiveTensors
from bayeslim.train.captured_step import step_of
from bayeslim.train.step import Step

BATCH = 128
"""Examples of a training step."""
FIT_BATCH = 64
"""Examples of a minibatch of a fit."""
EPOCHS = 2
CALLS_PER_TURN = 3
CALLS_ON_A_GPU = 20
"""Calls between two synchronisations with a GPU."""

Action = Callable[[], Any]
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A method of this library as a contender.

    Attributes:
        method: makes the method.
        prior: the prior of the weights; the default if None.
        needs: a layer that the network needs, put before its last one.
        options: of `fit`, beside the number of epochs.
    """

    method: Callable[[], bl.Method]
    prior: Callable[[], bl.priors.Prior] | None = None
    needs: Callable[[int], nn.Module] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def network(self, network: nn.Module) -> nn.Module:
        """Copy the network, with the layer that the method needs."""
        copied = copy.deepcopy(network)
        if self.needs is None:
            return copied
        *layers, last = copied.children()
        return nn.Sequential(*layers, self.needs(last.in_features), last)

    def bayesian(self, network: nn.Module) -> bl.Bayesian:
        """Make the network Bayesian."""
        device = next(network.parameters()).device
        return bl.bayesianize_(
            self.network(network).to(device),
            self.method(),
            likelihood=bl.likelihoods.Categorical(),
            prior=None if self.prior is None else self.prior(),
            num_data=NUM_DATA,
        )

    def contender(self, network: nn.Module, batch: Batch) -> Contender:
        """Build the step."""
        bnn = self.bayesian(network).train()
        optimizer = bnn.optimizer(steps_per_epoch=NUM_DATA // BATCH)
        eager = Step(bnn, bnn.objective, optimizer, batch[0].device, None, None, False)
        step = step_of(eager, "auto", 1)
        return Contender(lambda: step(batch, 1, True), lambda x: bl.predict(bnn, x, samples=SAMPLES).probs)

    def fit(self, network: nn.Module, loader: Any) -> bl.Bayesian:
        """Make the network Bayesian, and fit it."""
        bnn = self.bayesian(network)
        bnn.fit(loader, epochs=EPOCHS, progress=False, **self.options)
        return bnn


METHODS: dict[str, Entry] = {
    "Variational, shared noise": Entry(lambda: bl.Variational(estimator="shared")),
    "Variational, local noise": Entry(lambda: bl.Variational(estimator="local")),
    "Variational, Flipout": Entry(lambda: bl.Variational(estimator="flipout")),
    "Variational, scale mixture": Entry(lambda: bl.Variational(estimator="shared"), bl.priors.ScaleMixture),
    "Variational, sparse": Entry(lambda: bl.Variational(bl.families.SparseGaussian()), bl.priors.LogUniform),
    "Variational, low rank": Entry(lambda: bl.Variational(bl.families.LowRankGaussian(4))),
    "Variational, 2 modes": Entry(lambda: bl.Variational(bl.families.MixtureOfGaussians(2))),
    "Variational, Rényi 1/2": Entry(lambda: bl.Variational(renyi=0.5, samples=2)),
    "Variational, gates": Entry(lambda: bl.Variational(gates=bl.gates.NormalJeffreys())),
    "IVON": Entry(bl.IVON),
    "MCDropout": Entry(bl.MCDropout, needs=lambda width: nn.Dropout(0.1)),
    "MCBatchNorm": Entry(lambda: bl.MCBatchNorm(samples=8), needs=nn.BatchNorm1d),
    "MCAugmentation": Entry(lambda: bl.MCAugmentation(noise=0.1)),
    "Laplace, Kronecker": Entry(bl.Laplace),
    "Laplace, diagonal": Entry(lambda: bl.Laplace("diag")),
    "Laplace, last layer": Entry(lambda: bl.Laplace(subset="last-layer")),
    "DeepEnsemble of 5": Entry(lambda: bl.DeepEnsemble(5)),
    "Snapshot of 2": Entry(lambda: bl.Snapshot(2)),
    "SWA": Entry(bl.SWA),
    "SWAG": Entry(lambda: bl.SWAG(start=0.0, every=1)),
    "MultiSWAG of 2": Entry(lambda: bl.MultiSWAG(members=2, start=0.0, every=1)),
    "SGLD": Entry(lambda: bl.SGLD(samples=4)),
    "PSGLD": Entry(lambda: bl.PSGLD(samples=4)),
    "SGHMC": Entry(lambda: bl.SGHMC(samples=4)),
    "SGNHT": Entry(lambda: bl.SGNHT(samples=4)),
    "HMC": Entry(lambda: bl.HMC(samples=4, warmup=2, leapfrog=3)),
    "SVGD of 5": Entry(lambda: bl.SVGD(particles=5)),
    "Subspace, HMC": Entry(lambda: bl.Subspace(rank=2, snapshots=4, inner=bl.HMC(4, 2, 3))),
}

WITHOUT_A_STEP = frozenset({"HMC", "SVGD of 5", "Subspace, HMC"})
"""Methods that do not train one network by steps on minibatches: only their fits are compared."""


@dataclass
class Problem:
    """A network with its data, on a device.

    Attributes:
        network: the plain network.
        batch: of the steps.
        inputs: to predict.
        loader: of the fits.
    """

    network: nn.Module
    batch: Batch
    inputs: Tensor
    loader: Any

    @classmethod
    def of(cls, network: nn.Module, device: str, inputs: int, examples: int) -> Problem:
        """Draw random images and classes."""
        torch.manual_seed(0)
        network = network.to(device)
        batch = torch.rand(BATCH, 1, 28, 28, device=device), torch.randint(10, (BATCH,), device=device)
        x, y = torch.rand(examples, 1, 28, 28), torch.randint(10, (examples,))
        loader = bl.data.Loader(x, y, batch_size=FIT_BATCH, device=device)
        return cls(network, batch, torch.rand(inputs, 1, 28, 28, device=device), loader)

    @property
    def device(self) -> str:
        """The kind of device."""
        return self.batch[0].device.type

    def contenders(self, wanted: list[str] | None, of_steps: bool = True) -> dict[str, Callable[[], Contender]]:
        """List the builders: the plain network, every method and every installed peer."""
        found: dict[str, Callable[[], Contender]] = {PLAIN: lambda: plain(self.network, self.batch)}
        for name, entry in METHODS.items():
            if not (of_steps and name in WITHOUT_A_STEP):
                found[name] = lambda entry=entry: entry.contender(self.network, self.batch)
        for name in versions(PEERS):
            found[name] = lambda build=PEERS[name]: self._peer(build)
        return {name: build for name, build in found.items() if wanted is None or name in (PLAIN, *wanted)}

    def _peer(self, build: Callable[[nn.Module, Batch], Contender]) -> Contender:
        with torch.device(self.device):
            return build(self.network, self.batch)

    def steps(self, seconds: float, wanted: list[str] | None) -> Rows:
        """Time a training step of every contender."""
        builders = self.contenders(wanted)
        made, failed = _tried({name: lambda b=build: b().step for name, build in builders.items()})
        return self._ratios(made, seconds, CALLS_PER_TURN) | failed

    def predictions(self, seconds: float, wanted: list[str] | None) -> Rows:
        """Time predictions of fitted methods and of peers, against one pass of the plain network."""

        def fitted(entry: Entry) -> Action:
            bnn = entry.fit(self.network, self.loader).eval()
            return lambda: bl.predict(bnn, self.inputs, samples=SAMPLES).probs

        def of_others(build: Callable[[], Contender]) -> Action:
            predict = build().predict
            return lambda: predict(self.inputs)

        builders: dict[str, Callable[[], Action]] = {}
        for name, build in self.contenders(wanted, of_steps=False).items():
            entry = METHODS.get(name)
            builders[name] = (lambda b=build: of_others(b)) if entry is None else (lambda e=entry: fitted(e))
        made, failed = _tried(builders)
        without = {name: _without_gradients(action) for name, action in made.items()}
        return self._ratios(without, seconds, 1) | failed

    def fits(self, seconds: float, wanted: list[str] | None) -> Rows:
        """Time whole fits, against the plain network's training for as many epochs."""
        actions: dict[str, Callable[[], Action]] = {PLAIN: lambda: self._plain_fit}
        for name, entry in METHODS.items():
            if wanted is None or name in wanted:
                actions[name] = lambda e=entry: lambda: e.fit(self.network, self.loader)
        made, failed = _tried(actions)
        return self._ratios(made, seconds, 1, on_a_gpu=1) | failed

    def _plain_fit(self) -> None:
        network = copy.deepcopy(self.network)
        optimizer = torch.optim.Adam(network.parameters(), fused=True)
        for _ in range(EPOCHS):
            for x, y in self.loader:
                F.cross_entropy(network(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    def memory(self, seconds: float, wanted: list[str] | None) -> Rows:
        """Count the peak bytes of live tensors: in a fit, or from the conversion to the end of two steps of a peer.

        Args:
            seconds: not used, since a count needs no repetition.
            wanted: the contenders; all if None.
        """

        def of_peer(build: Callable[[], Contender]) -> None:
            _batch = [part.clone() for part in small.batch]  # a fit holds a batch too
            step = build().step
            step()
            step()

        actions: dict[str, Action] = {}
        small = replace(self, batch=(self.batch[0][:FIT_BATCH], self.batch[1][:FIT_BATCH]))
        for name, build in small.contenders(wanted, of_steps=False).items():
            entry = METHODS.get(name)
            actions[name] = (lambda b=build: of_peer(b)) if entry is None else (lambda e=entry: self._fit(e))
        actions[PLAIN] = self._plain_fit
        rows: Rows = {}
        for name, action in actions.items():
            try:
                rows[name] = {"mb": round(self._peak_bytes(action) / 1e6, 3)}
            except Exception as error:
                rows[name] = {"failed": _reason(error)}
        for row in rows.values():
            if "mb" in row:
                row["ratio"] = row["ratio_low"] = row["ratio_high"] = float(f"{row['mb'] / rows[PLAIN]['mb']:.4g}")
        return rows

    def _fit(self, entry: Entry) -> None:
        entry.fit(self.network, self.loader)

    def _peak_bytes(self, action: Action) -> int:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            action()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        counter = LiveTensors([*self.network.parameters(), *self.batch, self.loader.dataset.x, self.loader.dataset.y])
        with counter:
            action()
        return counter.peak

    def _ratios(self, actions: dict[str, Action], seconds: float, calls: int, on_a_gpu: int = CALLS_ON_A_GPU) -> Rows:
        """Let the actions take turns; one turn on a GPU has several calls and one synchronisation."""
        inside = on_a_gpu if self.device == "cuda" else 1
        timed = {
            name: _synchronised(action, inside) if self.device == "cuda" else action for name, action in actions.items()
        }
        times = take_turns(timed, seconds * calls / (calls + 1), calls, patience=0.2 * seconds)
        shared: Times = {name: [(turn / inside, cores) for turn, cores in turns] for name, turns in times.items()}
        return {name: dict(row) for name, row in summary(shared).items()}


def _tried(builders: Mapping[str, Callable[[], Action]]) -> tuple[dict[str, Action], Rows]:
    """Build every action and call it once; leave out those that fail, with the reason."""
    made: dict[str, Action] = {}
    failed: Rows = {}
    for name, build in builders.items():
        try:
            action = build()
            action()
            made[name] = action
        except Exception as error:
            if name == PLAIN:
                raise
            failed[name] = {"failed": _reason(error)}
    return made, failed


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


def _without_gradients(action: Action) -> Action:
    def run() -> Any:
        with torch.no_grad():
            return action()

    return run


def _synchronised(action: Action, calls: int) -> Action:
    def run() -> None:
        for _ in range(calls):
            action()
        torch.cuda.synchronize()

    return run
