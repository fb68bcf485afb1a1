"""The contenders: one network made Bayesian by each library, as it documents.

Every builder takes the same plain network and the same batch and returns the same two actions: one training step
(forward, KL, backward, optimizer) and a prediction (class probabilities averaged over 32 networks). Where a library
leaves the optimizer to the user it gets the plain network's own, a fused Adam; IVON *is* an optimizer, and posteriors
needs torchopt's, which has an accelerated Adam of its own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayeslim as bl

NUM_DATA = 60_000
SAMPLES = 32
LR = 1e-3

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Contender:
    """The timed actions of a library.

    Attributes:
        step: one training step on the batch it was built with.
        predict: class probabilities of inputs, averaged over `SAMPLES` networks; one pass for the plain network.
    """

    step: Callable[[], None]
    predict: Callable[[Tensor], Tensor]


def plain(network: nn.Module, batch: Batch) -> Contender:
    """Build the plain network, trained by cross-entropy."""
    network = copy.deepcopy(network)
    x, y = batch
    step = adam_step(network, lambda: F.cross_entropy(network(x), y))
    return Contender(step, lambda inputs: network(inputs).softmax(-1))


def bayeslim(estimator: str) -> Callable[[nn.Module, Batch], Contender]:
    """Return a builder of mean-field variational inference by this library."""

    def build(network: nn.Module, batch: Batch) -> Contender:
        bnn = bl.bayesianize(
            network, bl.Variational(estimator=estimator), likelihood=bl.likelihoods.Categorical(), num_data=NUM_DATA
        )
        optimizer = bnn.optimizer(lr=LR)

        def step() -> None:
            optimizer.zero_grad()
            bnn.loss(batch).backward()
            optimizer.step()

        return Contender(step, lambda inputs: bl.predict(bnn, inputs, samples=SAMPLES).probs)

    return build


def bayesian_torch(network: nn.Module, batch: Batch) -> Contender:
    """Build with `dnn_to_bnn`; its README divides the KL by the batch size."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    network = copy.deepcopy(network)
    dnn_to_bnn(
        network,
        {
            "prior_mu": 0.0,
            "prior_sigma": 1.0,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -3.0,
            "type": "Reparameterization",
            "moped_enable": False,
        },
    )
    x, y = batch
    network = network.to(x.device)  # its buffers ignore the default device
    step = adam_step(network, lambda: F.cross_entropy(network(x), y) + get_kl_loss(network) / len(x))
    return Contender(step, average(network))


def torchbnn(network: nn.Module, batch: Batch) -> Contender:
    """Build with `BayesLinear`, `BayesConv2d` and `BKLLoss`."""
    import torchbnn as bnn

    prior = {"prior_mu": 0, "prior_sigma": 0.1}
    network = swapped(
        network,
        linear=lambda fc: bnn.BayesLinear(**prior, in_features=fc.in_features, out_features=fc.out_features),
        conv=lambda c: bnn.BayesConv2d(
            **prior, in_channels=c.in_channels, out_channels=c.out_channels, kernel_size=c.kernel_size
        ),
    )
    kl = bnn.BKLLoss(reduction="mean", last_layer_only=False)
    x, y = batch
    network = network.to(x.device)
    step = adam_step(network, lambda: (F.cross_entropy(network(x), y) + 0.01 * kl(network)).squeeze())
    return Contender(step, average(network))


def blitz(network: nn.Module, batch: Batch) -> Contender:
    """Build with `BayesianLinear` and `BayesianConv2d`, trained by `sample_elbo`."""
    from blitz.modules import BayesianConv2d, BayesianLinear
    from blitz.utils import variational_estimator

    estimator = variational_estimator(type("Estimator", (nn.Sequential,), {}))
    network = estimator(
        *swapped(
            network,
            linear=lambda fc: BayesianLinear(fc.in_features, fc.out_features),
            conv=lambda c: BayesianConv2d(c.in_channels, c.out_channels, c.kernel_size),
        )
    )
    x, y = batch
    network = network.to(x.device)
    criterion = nn.CrossEntropyLoss()
    step = adam_step(
        network,
        lambda: network.sample_elbo(
            inputs=x, labels=y, criterion=criterion, sample_nbr=1, complexity_cost_weight=1 / NUM_DATA
        ),
    )
    return Contender(step, average(network))


def ivon(network: nn.Module, batch: Batch) -> Contender:
    """Build with the optimizer IVON instead of Adam; its update includes the KL."""
    from ivon import IVON

    network = copy.deepcopy(network)
    optimizer = IVON(network.parameters(), lr=0.1, ess=NUM_DATA)
    x, y = batch

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
        optimizer.step()

    def draw(inputs: Tensor) -> Tensor:
        with optimizer.sampled_params():
            return network(inputs)

    return Contender(step, average(draw))


def posteriors(network: nn.Module, batch: Batch) -> Contender:
    """Build with `vi.diag` at temperature 1/N, on a log posterior divided by N."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from the way its classes use tensordict
        import torchopt

        import posteriors as ps

    network = copy.deepcopy(network)
    as_function = ps.model_to_function(network)

    def log_posterior(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = as_function(params, batch[0])
        log_prior = ps.diag_normal_log_prob(params, sd_diag=1.0, normalize=False)
        return -F.cross_entropy(outputs, batch[1]) + log_prior / NUM_DATA, outputs

    transform = ps.vi.diag.build(
        log_posterior,
        optimizer=torchopt.adam(lr=LR, use_accelerated_op=True),
        temperature=1 / NUM_DATA,
        init_log_sds=-3.0,
    )
    state = transform.init(dict(network.named_parameters()))

    def step() -> None:
        nonlocal state
        state, _ = transform.update(state, batch)

    return Contender(step, average(lambda inputs: as_function(ps.vi.diag.sample(state), inputs)))


PLAIN = "plain network"

OURS: dict[str, Callable[[nn.Module, Batch], Contender]] = {
    f"bayeslim {estimator}": bayeslim(estimator) for estimator in ("shared", "local", "flipout")
}

PEERS: dict[str, Callable[[nn.Module, Batch], Contender]] = {
    "bayesian-torch": bayesian_torch,
    "torchbnn": torchbnn,
    "blitz-bayesian-pytorch": blitz,
    "ivon-opt": ivon,
    "posteriors": posteriors,
}
"""Builders by the name of the distribution they need."""


def adam_step(network: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Make a training step with the fused Adam that all contenders share."""
    optimizer = torch.optim.Adam(network.parameters(), lr=LR, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def average(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Average the class probabilities of `SAMPLES` draws of the network."""

    def predict(inputs: Tensor) -> Tensor:
        return torch.stack([draw(inputs).softmax(-1) for _ in range(SAMPLES)]).mean(0)

    return predict


def swapped(
    network: nn.Module, linear: Callable[[nn.Linear], nn.Module], conv: Callable[[nn.Conv2d], nn.Module]
) -> nn.Sequential:
    """Replace linear and convolutional layers by those of another library."""
    layers = []
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            layers.append(linear(layer))
        elif isinstance(layer, nn.Conv2d):
            layers.append(conv(layer))
        else:
            layers.append(copy.deepcopy(layer))
    return nn.Sequential(*layers)
