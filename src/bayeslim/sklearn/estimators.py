"""`BayesianClassifier` and `BayesianRegressor`: any network and any method behind scikit-learn's interface.

Inputs and targets are standardised inside, so that one learning rate and one prior fit data in any units. Networks are
float64, as scikit-learn's own estimators are: a prediction does not depend on the rows it is made together with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayeslim.app.zoo.mlp import mlp
from bayeslim.bayesian import Bayesian, bayesianize
from bayeslim.errors import ShapeMismatch, check_number, check_whole
from bayeslim.likelihoods import Categorical, Gaussian, Likelihood
from bayeslim.methods.base import Method
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.mc_dropout import MCDropout
from bayeslim.methods.variational import Variational
from bayeslim.noise import kept_random_state
from bayeslim.predict.predict import predict
from bayeslim.priors import PriorSpec
from bayeslim.replica import replicate
from bayeslim.results import Prediction
from bayeslim.sklearn.stored import from_files, to_files
from bayeslim.train.dataset import Scale
from bayeslim.train.loaders import Loader
from bayeslim.types import chosen_device, device_of

Array = NDArray[Any]
Factory = Callable[[int, int], nn.Module]

INITIAL_NOISE = 0.5
"""The first value of the learned noise, in standard deviations of the targets."""

DROPOUT = 0.1
"""The probability of dropping a hidden unit of the built-in network, where the method is `MCDropout`."""


class BayesianEstimator(BaseEstimator):
    """The part that both estimators share: training, prediction and pickling."""

    bnn_: Bayesian
    architecture_: dict[str, Any]

    def __init__(
        self,
        module: Factory | None = None,
        method: Method | None = None,
        *,
        prior: PriorSpec | None = None,
        hidden: int = 50,
        depth: int = 2,
        max_epochs: int = 100,
        lr: float | None = 0.01,
        batch_size: int = 32,
        samples: int | None = None,
        fit_options: Mapping[str, Any] | None = None,
        device: str | None = None,
        random_state: Any = None,
    ):
        self.module = module
        self.method = method
        self.prior = prior
        self.hidden = hidden
        self.depth = depth
        self.max_epochs = max_epochs
        self.lr = lr
        self.batch_size = batch_size
        self.samples = samples
        self.fit_options = fit_options
        self.device = device
        self.random_state = random_state

    def _fit(self, X: Array, y: Tensor, outputs: int, likelihood: Likelihood) -> Self:
        """Find the posterior of checked data.

        Args:
            X: inputs, (N, D).
            y: targets as the likelihood takes them.
            outputs: the number of outputs of the network.
            likelihood: of the targets.
        """
        check_whole("batch_size", self.batch_size)
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        scale = Scale.of(torch.tensor(X))
        self.input_mean_, self.input_std_ = scale.mean.numpy(), scale.std.numpy()
        self.n_outputs_ = outputs
        method = Laplace() if self.method is None else self.method
        dropout = DROPOUT if isinstance(method, MCDropout) else 0.0
        self.architecture_ = {"module": self.module, "hidden": self.hidden, "depth": self.depth, "dropout": dropout}
        with kept_random_state():
            torch.manual_seed(self.seed_)
            network = self._network()
            bnn = bayesianize(network, method, likelihood=likelihood, prior=self.prior)
            if isinstance(likelihood, Categorical):
                _check_classes(network, self._inputs(X[:1]), outputs)
        if self.device is not None:
            bnn.to(chosen_device(self.device))
        # a batch norm cannot train on a single row
        alone = len(X) > self.batch_size and len(X) % self.batch_size == 1 and _has_batch_norm(network)
        loader = Loader(self._inputs(X), y, self.batch_size, seed=self.seed_, device=self.device, drop_last=alone)
        options = {"epochs": self.max_epochs, "lr": self.lr, "seed": self.seed_, "progress": False}
        options |= _usual_options(method) if self.fit_options is None else self.fit_options
        result = bnn.fit(loader, **options)
        self.loss_curve_ = [epoch["loss"] for epoch in result.history if "loss" in epoch]
        self.bnn_ = bnn.eval()
        return self

    def _network(self) -> nn.Module:
        """Build a network of the architecture of the fit with random weights, in float64."""
        inputs, outputs, given = self.n_features_in_, self.n_outputs_, self.architecture_
        module = given["module"]
        if module is None:
            network: Any = mlp(given["hidden"], inputs, outputs, given["depth"], given["dropout"])
        else:
            network = module(inputs, outputs) if callable(module) and not isinstance(module, nn.Module) else None
        if not isinstance(network, nn.Module):
            raise TypeError(
                "module must be a function of the numbers of inputs and outputs that returns a torch.nn.Module, such "
                f"as a class. Got {module!r}."
            )
        return network.double()

    def _inputs(self, X: Array) -> Tensor:
        return torch.from_numpy((X - self.input_mean_) / self.input_std_)

    def _prediction(self, X: Any, samples: int | None = None, how: str = "auto", seed: int = 0) -> Prediction:
        """Predict standardised targets; the same rows give the same answer every time."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        generator = torch.Generator().manual_seed(self.seed_ + seed)
        return predict(self.bnn_, self._inputs(X), samples or self.samples, how, generator=generator).to("cpu")

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if "bnn_" in state:
            state["bnn_"] = to_files(state["bnn_"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        files = self.__dict__.get("bnn_")
        if isinstance(files, dict):
            with kept_random_state():
                bnn = from_files(files, self._network())
            self.bnn_ = bnn if self.device is None else bnn.to(chosen_device(self.device))


class BayesianClassifier(ClassifierMixin, BayesianEstimator):
    """A classifier whose probabilities average over the posterior of a network.

    Args:
        module: a function of the numbers of inputs and outputs that builds a network, such as a class; None for a
            multilayer perceptron.
        method: how to find the posterior; None for `bl.Laplace()`.
        prior: of the weights; None for `bl.priors.Normal(1.0)`.
        hidden: units of each hidden layer, where `module` is None.
        depth: hidden layers, where `module` is None.
        max_epochs: passes over the data.
        lr: the learning rate; None for the default of the method, which samplers need.
        batch_size: rows of a batch.
        samples: networks to average in predictions; None for the default of `bl.predict`.
        fit_options: options of `bnn.fit`, which take precedence; None for a learning rate that falls to zero and, with
            Laplace, a prior precision that maximises the evidence, found during training.
        device: where to train and predict, such as "cuda"; None for the CPU.
        random_state: a seed, for repeatable results.

    Attributes:
        bnn_: the fitted `Bayesian`, for every verb of the library.
        classes_: the labels.
        loss_curve_: the mean loss of every epoch.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(60, 2))
    >>> model = BayesianClassifier(max_epochs=20, random_state=0).fit(X, np.where(X[:, 0] > 0, "right", "left"))
    >>> model.predict([[-3.0, 0.0], [3.0, 0.0]])
    array(['left', 'right'], dtype='<U5')
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network and find its posterior.

        Args:
            X: inputs, (N, D).
            y: labels, (N,).
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        return self._fit(X, torch.from_numpy(labels.astype(np.int64)), len(self.classes_), Categorical())

    def predict_proba(self, X: Any) -> Array:
        """Predict the probability of each class, (N, C)."""
        probs = self._prediction(X).probs
        assert probs is not None
        return probs.numpy()

    def predict(self, X: Any) -> Array:
        """Predict the most probable class of each row, (N,)."""
        chosen = self.predict_proba(X).argmax(1)
        found: Array = self.classes_[chosen]
        return found

    def predict_uncertainty(self, X: Any) -> dict[str, Array]:
        """Predict the parts of the uncertainty of each row, in nats, each (N,).

        They are "total", the entropy of the averaged probabilities, "aleatoric", the noise of the labels, and
        "epistemic", the part that more data would remove.
        """
        found = self._prediction(X)
        parts = {"total": found.entropy, "aleatoric": found.aleatoric, "epistemic": found.epistemic}
        return {name: part.numpy() for name, part in parts.items()}

    def sample_proba(self, X: Any, n_samples: int = 32, random_state: int = 0) -> Array:
        """Compute the probabilities of networks drawn from the posterior, (S, N, C).

        Args:
            X: inputs, (N, D).
            n_samples: the number of networks.
            random_state: a seed; the same one gives the same networks.
        """
        check_is_fitted(self)
        how = "joint" if isinstance(self.bnn_.method, Laplace) else "auto"
        return self._prediction(X, n_samples, how, random_state).samples.softmax(-1).numpy()


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """A regressor whose predictions average over the posterior of a network.

    Args:
        module: a function of the numbers of inputs and outputs that builds a network, such as a class; None for a
            multilayer perceptron.
        method: how to find the posterior; None for `bl.Laplace()`.
        noise: "learned", one standard deviation for all rows; or "heteroscedastic", one that the network predicts for
            each row, for which it has twice as many outputs.
        prior: of the weights; None for `bl.priors.Normal(1.0)`.
        hidden: units of each hidden layer, where `module` is None.
        depth: hidden layers, where `module` is None.
        max_epochs: passes over the data.
        lr: the learning rate; None for the default of the method, which samplers need.
        batch_size: rows of a batch.
        samples: networks to average in predictions; None for the default of `bl.predict`.
        fit_options: options of `bnn.fit`, which take precedence; None for a learning rate that falls to zero and, with
            Laplace, a prior precision that maximises the evidence, found during training.
        device: where to train and predict, such as "cuda"; None for the CPU.
        random_state: a seed, for repeatable results.

    Attributes:
        bnn_: the fitted `Bayesian` of standardised inputs and targets.
        loss_curve_: the mean loss of every epoch.

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> model = BayesianRegressor(max_epochs=40, random_state=0).fit(X, 100 * X[:, 0])
    >>> mean, std = model.predict([[0.5], [5.0]], return_std=True)
    >>> bool(abs(mean[0] - 50) < 10), bool(std[1] > std[0])
    (True, True)
    """

    def __init__(
        self,
        module: Factory | None = None,
        method: Method | None = None,
        *,
        noise: str = "learned",
        prior: PriorSpec | None = None,
        hidden: int = 50,
        depth: int = 2,
        max_epochs: int = 100,
        lr: float | None = 0.01,
        batch_size: int = 32,
        samples: int | None = None,
        fit_options: Mapping[str, Any] | None = None,
        device: str | None = None,
        random_state: Any = None,
    ):
        super().__init__(
            module, method, prior=prior, hidden=hidden, depth=depth, max_epochs=max_epochs, lr=lr,
            batch_size=batch_size, samples=samples, fit_options=fit_options, device=device, random_state=random_state,
        )  # fmt: skip
        self.noise = noise

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network and find its posterior.

        Args:
            X: inputs, (N, D).
            y: targets, (N,), or (N, M) for several.
        """
        if self.noise not in ("learned", "heteroscedastic"):
            raise ValueError(f'noise must be "learned" or "heteroscedastic". Got {self.noise!r}.')
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self.target_shape_ = y.shape[1:]
        targets = torch.tensor(y, dtype=torch.float64).reshape(len(y), -1)
        scale = Scale.of(targets)
        self.target_mean_, self.target_std_ = scale.mean.numpy(), scale.std.numpy()
        outputs = targets.shape[1] * (2 if self.noise == "heteroscedastic" else 1)
        likelihood = Gaussian("heteroscedastic") if outputs > targets.shape[1] else _learned_noise()
        return self._fit(X, scale.standardise(targets), outputs, likelihood)

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Predict the targets.

        Args:
            X: inputs, (N, D).
            return_std: whether to return the standard deviations of the targets too, noise included.
        """
        found = self._prediction(X)
        mean = self._shaped(found.mean.numpy() * self.target_std_ + self.target_mean_)
        return (mean, self._shaped(found.std.numpy() * self.target_std_)) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Array:
        """Predict central intervals of the targets, (N, 2), or (N, 2, M) for several.

        Args:
            X: inputs, (N, D).
            coverage: the probability that a target lies inside, under the posterior. `bl.conformal` and MAPIE make
                intervals with a guarantee, from held-out data.
        """
        check_number("coverage", coverage, above=0, below=1)
        ends = self._prediction(X).interval(coverage)
        return np.stack([self._shaped(end.numpy() * self.target_std_ + self.target_mean_) for end in ends], axis=1)

    def predict_uncertainty(self, X: Any) -> dict[str, Array]:
        """Predict the parts of the uncertainty of each row, as standard deviations.

        They are "total", "aleatoric", the noise of the targets, and "epistemic", the part that more data would remove;
        the squares of the last two add up to that of the first.
        """
        found = self._prediction(X)
        parts = {"total": found.variance, "aleatoric": found.aleatoric, "epistemic": found.epistemic}
        return {name: self._shaped(part.sqrt().numpy() * self.target_std_) for name, part in parts.items()}

    def _shaped(self, values: Array) -> Array:
        """Give predictions the shape of the targets."""
        return values.reshape(len(values), *self.target_shape_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _check_classes(network: nn.Module, x: Tensor, classes: int) -> None:
    """Raise unless a network has an output for every class, and no more."""
    with torch.no_grad():
        shape = replicate(network)(x.to(device_of(network))).shape
    if shape != (len(x), classes):
        raise ShapeMismatch(
            f"The network that module builds must have one output for each of the {classes} classes. Got outputs of "
            f"shape {tuple(shape)} for {len(x)} row. Use the second argument of module, the number of outputs."
        )


def _has_batch_norm(network: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in network.modules())


def _learned_noise() -> Gaussian:
    return Gaussian("learned", initial_noise=INITIAL_NOISE)


def _usual_options(method: Method) -> dict[str, Any]:
    """Choose options of `fit` that suit small tables."""
    if isinstance(method, Laplace):
        return {"lr_schedule": "cosine", "tune": "online"}
    return {"lr_schedule": "cosine"} if isinstance(method, Variational) else {}
