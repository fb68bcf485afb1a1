"""`Surrogate`: the posterior of a network over functions, for the acquisition functions of BoTorch.

A number of functions f(·; w_s) is drawn once, w_s ~ q(w), and the posterior at any inputs X is the ensemble of their
values. Their gradients with respect to X are exact, so acquisition functions are maximised as for a Gaussian process.

    sampled      f(x; w_s)                              of every method with a posterior over weights
    linearised   f(x; w*) ± J(x) ε_s,  ε_s ~ N(0, P⁻¹)   of Laplace, as `bl.predict` does
    dropped out  f(x; w ∘ z_s)                           of MCDropout, with one mask z_s for all inputs

The values are those of the function itself: noise of observations is not part of them.
"""

from __future__ import annotations

from typing import Any

import torch
from botorch.models.ensemble import EnsembleModel
from torch import Tensor
from torch.func import functional_call, jvp, vmap

from bayeslim.bayesian import Bayesian
from bayeslim.errors import ShapeMismatch, UnsupportedModel, check_whole
from bayeslim.likelihoods import Gaussian as GaussianLikelihood
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.mc_dropout import MCDropout
from bayeslim.methods.shared.noisy_network import NoisyNetwork
from bayeslim.noise import drawing_from
from bayeslim.posteriors import Gaussian, Particles
from bayeslim.replica import Slots
from bayeslim.train.dataset import Scale
from bayeslim.train.seeding import seed_of_chain
from bayeslim.types import Params, device_of, fitting


class Surrogate(EnsembleModel):
    """A fitted network of values as a model of BoTorch.

    Args:
        bnn: a fitted network with a Gaussian likelihood.
        samples: functions that are drawn; of particles all are used.
        input_scale: the scale that standardised the inputs of training; X is then in the data's own units.
        target_scale: the scale that standardised the targets.
        outputs: the number of targets.
        seed: of the draws. The same functions are used for all X, so acquisition functions do not jump.

    Raises:
        UnsupportedModel: for networks of anything but values, and for methods whose draws are no functions of X.
    """

    def __init__(
        self,
        bnn: Bayesian,
        samples: int = 64,
        *,
        input_scale: Scale | None = None,
        target_scale: Scale | None = None,
        outputs: int = 1,
        seed: int = 0,
    ):
        super().__init__()
        if not isinstance(bnn, Bayesian) or not isinstance(bnn.likelihood, GaussianLikelihood):
            raise UnsupportedModel(
                "Surrogate needs a Bayesian network of values: bl.bayesianize(network, method, "
                f"likelihood=bl.likelihoods.Gaussian(...)). Got {bnn!r}."
            )
        self.is_linearised, self.is_noisy = isinstance(bnn.method, Laplace), isinstance(bnn.method, NoisyNetwork)
        if self.is_noisy and not isinstance(bnn.method, MCDropout):
            raise UnsupportedModel(
                f"Surrogate needs draws that are functions of the inputs. {type(bnn.method).__name__} draws its noise "
                "again for every row. Use another method, such as bl.Laplace() or bl.MCDropout()."
            )
        check_whole("samples", samples)
        self._num_outputs, self._samples, self._seed = outputs, samples, seed
        self.input_scale, self.target_scale = input_scale, target_scale
        self._bnn = [bnn]  # in a list, here and below: `eval` and `to` of the surrogate leave the network alone
        posterior, twin = bnn.posterior_, bnn.replica()
        slots = Slots(twin.model)
        slots.put({name: tensor.detach() for name, tensor in slots.own.items()})
        self._twin = [twin]
        with torch.no_grad():
            if self.is_noisy:
                self._draws: Params = {}
            elif self.is_linearised:
                assert isinstance(posterior, Gaussian)
                half = posterior.noise((samples + 1) // 2, generator=_generator(bnn, seed))
                self._draws = _stack(bnn, {name: torch.cat([e, -e])[:samples] for name, e in half.items()})
            elif isinstance(posterior, Particles):
                self._draws = _stack(bnn, posterior.values) | dict(posterior.buffers)
            else:
                self._draws = _stack(bnn, posterior.sample(samples, generator=_generator(bnn, seed)))
            self._mean: Params = {n: m.detach().clone() for n, m in fitting(bnn.model, posterior.mean).items()}

    @property
    def bnn(self) -> Bayesian:
        """The network."""
        return self._bnn[0]

    def forward(self, X: Tensor) -> Tensor:
        """Compute the values of all drawn functions.

        Args:
            X: inputs, (..., N, D).

        Returns:
            values, (..., S, N, M).
        """
        network = self._twin[0].model
        parameter = next(iter(self._mean.values()))
        x = X if self.input_scale is None else self.input_scale.standardise(X)
        flat = x.reshape(-1, X.shape[-1]).to(parameter.dtype)

        def outputs(params: Params) -> Tensor:
            return self._values(functional_call(network, params, (flat,)))

        if self.is_noisy:
            values = self._values(self._dropped_out(flat))
        elif self.is_linearised:
            values = vmap(lambda noise: sum(jvp(outputs, (self._mean,), (noise,))))(self._draws)
        else:
            values = vmap(outputs)(self._draws)
        if values.shape[-1] != self._num_outputs:
            raise ShapeMismatch(
                f"The network has {values.shape[-1]} targets. Pass Surrogate(bnn, outputs={values.shape[-1]}). Got "
                f"outputs={self._num_outputs}."
            )
        values = values.to(X.dtype)
        if self.target_scale is not None:
            values = self.target_scale.restore(values)
        return values.unflatten(1, X.shape[:-1]).movedim(0, -3)

    def _dropped_out(self, x: Tensor) -> Tensor:
        """Compute the outputs with every draw of the masks, (S, N, ...)."""
        bnn, passes = self._twin[0], []
        method: Any = bnn.method
        prepared = method.prepared(bnn, [x], False)
        for index in range(self._samples):
            with drawing_from(_generator(bnn, seed_of_chain(self._seed, index))):
                passes.append(method.noisy_pass(bnn, prepared, False))
        return torch.stack(passes)

    def _values(self, outputs: Tensor) -> Tensor:
        """Take the means of outputs that hold log variances too."""
        likelihood: Any = self.bnn.likelihood
        return outputs.chunk(2, -1)[0] if likelihood.mode == "heteroscedastic" else outputs


def _stack(bnn: Bayesian, values: Params) -> Params:
    """Convert stacked weights to the dtypes and the device of the network."""
    return {name: value.to(bnn.model.get_parameter(name)) for name, value in values.items()}


def _generator(bnn: Bayesian, seed: int) -> torch.Generator:
    return torch.Generator(device_of(bnn.model)).manual_seed(seed)
