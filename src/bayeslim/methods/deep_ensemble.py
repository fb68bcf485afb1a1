"""Deep ensembles: the same network, trained several times from random starts.

    p(y|x, D) ≈ (1/M) Σ_m p(y|x, w_m)        w_m = argmax log p(D|w) + log p(w),  each found from its own random start

Every member also sees the data in its own order. Adversarial training (`shared/adversarial.py`) smooths the prediction
around the data.

Lakshminarayanan, Pritzel & Blundell 2017, arXiv:1612.01474
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.io.registry import register
from bayeslim.methods.base import Terms
from bayeslim.methods.shared.abreast import AbreastLoader, Stack, is_faster
from bayeslim.methods.shared.adversarial import adversarial_loss
from bayeslim.methods.shared.batch_norms import norms_of
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of
from bayeslim.methods.shared.members import joined_members, new_members
from bayeslim.methods.shared.particle_method import ParticleMethod, gathered, set_tensors, snapshot
from bayeslim.methods.shared.refit import restored_on_failure
from bayeslim.methods.shared.reinitialise import (
    OptimizerOf,
    check_optimizer_of,
    check_resettable,
    reinitialise_,
    trainable,
)
from bayeslim.posteriors import Particles
from bayeslim.posteriors.particles import tensors_of
from bayeslim.results import Fit
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.fit import fit
from bayeslim.train.loaders import training_set_size
from bayeslim.train.options import check_names
from bayeslim.train.seeding import seeded
from bayeslim.types import Batch, Inputs, Params, call, split_batch

_TOGETHER, _MEMBER = "together", "member-"
"""Names of checkpoints: of all members, and of each."""

_OPTIONS_FOR_ONE = ("validate", "patience", "callbacks", "clip")
"""Options of training that need members trained one by one."""

_MEMBER_SEED_STRIDE = 1_000_003
"""The difference between the seeds of two members; ranks add less than this to a seed."""


@register("method")
@dataclass(frozen=True)
class DeepEnsemble(ParticleMethod):
    """An ensemble of networks.

    The network itself is set to the last member, as their mean is not a useful network.

    Attributes:
        members: number of networks.
        adversarial: ε, the distance inputs are moved in adversarial training, in their own units; None for none.
        together: whether the members are trained vmapped, or one by one. "auto" trains them vmapped where that is
            faster and no option needs them one by one.
    """

    members: int = 5
    adversarial: float | None = None
    together: Literal["auto"] | bool = "auto"

    name: ClassVar[str] = "deep-ensemble"
    stands_at: ClassVar[Literal["mean", "last"]] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.members) is not int or self.members < 1:
            raise ValueError(f"members must be a whole number, at least 1. Got {self.members!r}.")
        if self.adversarial is not None and not self.adversarial > 0:
            raise ValueError(f"adversarial is a distance between inputs and must be positive. Got {self.adversarial}.")
        if self.together not in ("auto", True, False):
            raise ValueError(f'together must be True, False or "auto". Got {self.together!r}.')

    def loss(self, bnn: Bayesian, batch: Batch, kl_weight: float | None) -> Terms:
        """Compute the MAP loss of one network."""
        inputs, targets = split_batch(batch)

        def nll(at: Inputs) -> Tensor:
            return -bnn.likelihood.log_prob(call(bnn.model, at), targets).mean()

        value = nll(inputs) if self.adversarial is None else adversarial_loss(nll, inputs, self.adversarial)
        return Terms(value, -bnn.log_prior(), 1.0 if kl_weight is None else kl_weight, bnn.data_size())

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        start: Callable[[], nn.Module] | None = None,
        optimizer: OptimizerOf | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        **training: Any,
    ) -> Fit:
        """Train every member from a random start, or continue a fitted ensemble.

        Learned noise of the likelihood is averaged over the members.

        Args:
            bnn: the network; frozen parameters are the same in every member.
            loader: batches of inputs and targets, read by each member.
            start: a function that makes a new network, for modules that cannot draw new random weights themselves.
            optimizer: a function that makes an optimizer of the parameters; Adam if not given.
            checkpoint: a folder to save to after every epoch; an interrupted run resumes from it exactly.
            seed: makes the run repeatable, and leaves the global random state unchanged.
            **training: options of `bayeslim.train.fit` for every member.

        Returns:
            the history of all members, each epoch with the number of its member (from 1); for members trained together,
            their means.
        """
        check_optimizer_of(optimizer, "Every member needs its own optimizer.")
        if start is not None and not callable(start):
            raise TypeError(f"start must be a function that makes a network. Got {start!r}.")
        check_names("DeepEnsemble", training, fit)
        if training.get("compile") is True and self.adversarial is not None and norms_of(bnn.model):
            raise UnsupportedModel(
                "Batch norms in adversarial training cannot be compiled: they change their statistics inside of a "
                'gradient. Got compile=True. Use compile="auto", or networks without batch norms.'
            )
        previous = bnn.state.get("posterior")
        if previous is None and start is None:
            check_resettable(bnn.model)
        training = {**training, "seed": None}
        job = _Job(self, bnn, loader, previous, start, optimizer, checkpoint, seed, training)
        together = self._is_together(bnn, loader, optimizer, training)
        if checkpoint is not None:
            together = self._as_begun(Path(checkpoint), together)
        with restored_on_failure(bnn):
            result, particles = job.together() if together else job.one_by_one()
        self.keep(bnn, particles)
        return result

    def fit_stack(self, stack: Any, networks: Sequence[Bayesian], loader: Any, **options: Any) -> Fit:
        """Train the members of all networks at once."""
        if self.adversarial is not None and norms_of(stack.model):
            raise UnsupportedModel("Batch norms in adversarial training need members that are trained one by one.")
        if any("posterior" in network.state for network in networks):
            raise UnsupportedModel("Ensembles that have members already go on one by one: use bnn.fit for each.")
        members = new_members(networks, self.members)
        every = Stack.of(members)
        every.num_data, every.seed = stack.num_data, stack.seed
        result = fit(every, loader.repeated(self.members), **options)
        for network, found in zip(networks, joined_members(every, networks, members, result), strict=True):
            self.keep(network, found)
        return result

    def _as_begun(self, folder: Path, together: bool) -> bool:
        """Choose the way in which a checkpoint was begun, if the settings allow it."""
        begun = {name: any(folder.glob(f"{name}*")) for name in (_TOGETHER, _MEMBER)}
        this, other = (_TOGETHER, _MEMBER) if together else (_MEMBER, _TOGETHER)
        if begun[this] or not begun[other]:
            return together
        if together and self.together == "auto":
            return False
        raise BayeslimError(
            f"The checkpoint in {folder} is of members trained {'one by one' if together else 'together'}, and this "
            f"run would train them {'together' if together else 'one by one'}. Use the same options as before "
            f"({', '.join(_OPTIONS_FOR_ONE)}, optimizer, DeepEnsemble(together=...)), or another folder."
        )

    def _is_together(self, bnn: Bayesian, loader: Any, optimizer: Any, training: Mapping[str, Any]) -> bool:
        """Decide whether to train members together; raise if that is impossible."""
        if self.together is False:
            return False
        obstacles = [f"{option}=..." for option in _OPTIONS_FOR_ONE if training.get(option)]
        obstacles += ["continual learning"] if bnn.anchor is not None else []
        obstacles += ["several processes"] if rank_and_world()[1] > 1 else []
        obstacles += ["a loader with persistent_workers"] if getattr(loader, "persistent_workers", False) else []
        if self.adversarial is not None and norms_of(bnn.model):
            obstacles.append("batch norms in adversarial training")
        if self.together == "auto":
            return not obstacles and optimizer is None and self.members > 1 and is_faster(bnn.model)
        if obstacles:
            raise ValueError(
                f"Members cannot be trained together with {' and '.join(obstacles)}. "
                'Use DeepEnsemble(together="auto"), or leave these out.'
            )
        return True


@dataclass(frozen=True)
class _Job:
    """One fit of an ensemble."""

    method: DeepEnsemble
    bnn: Bayesian
    loader: Any
    previous: Particles | None
    start: Callable[[], nn.Module] | None
    optimizer: OptimizerOf | None
    folder: str | os.PathLike[str] | None
    seed: int | None
    training: dict[str, Any]

    @property
    def count(self) -> int:
        return self.method.members if self.previous is None else self.previous.count

    def one_by_one(self) -> tuple[Fit, Particles]:
        bnn, result, found = self.bnn, Fit(), []
        step, noise = bnn.step, noise_of(bnn.likelihood)
        noises: list[Params] = []
        for member in range(self.count):
            with seeded(self._seed_of(member), rank_and_world()[0], self.loader):
                self._begin(member)
                bnn.step = step
                bnn.likelihood.load_state_dict(noise)
                done = fit(bnn, self.loader, **self._options(bnn, f"{_MEMBER}{member + 1}"))
            found.append(snapshot(bnn))
            noises.append(noise_of(bnn.likelihood))
            result.history += [{"member": member + 1, **epoch} for epoch in done.history]
            result.seconds += done.seconds
            result.resumed_from += done.resumed_from
            result.stopped = done.stopped if result.stopped == "epochs" else result.stopped
        average_noise_(bnn.likelihood, noises)
        return result, gathered(found)

    def together(self) -> tuple[Fit, Particles]:
        with seeded(self.seed, 0, self.loader):
            members = []
            for member in range(self.count):
                self._begin(member)
                members.append(copy.deepcopy(self.bnn))
            stack = Stack.at(self.bnn, [tensors_of(one) for one in members])
            stack.num_data = training_set_size(self.bnn, self.loader)
            result = fit(stack, AbreastLoader([self.loader] * self.count), **self._options(stack, _TOGETHER))
        return result, joined_members(stack, [self.bnn], members, result)[0]

    def _begin(self, member: int) -> None:
        """Set the network to the start of a member."""
        if self.previous is None:
            reinitialise_(self.bnn.model, self.start)
        else:
            set_tensors(self.bnn, self.previous.particle(member) | self.previous.buffers_of(member))
        self.bnn.keep_zeros()

    def _options(self, bnn: Bayesian, name: str) -> dict[str, Any]:
        optimizer = None if self.optimizer is None else self.optimizer(trainable(bnn))
        checkpoint = None if self.folder is None else Path(self.folder) / name
        return {**self.training, "optimizer": optimizer, "checkpoint": checkpoint}

    def _seed_of(self, member: int) -> int | None:
        return None if self.seed is None else self.seed + member * _MEMBER_SEED_STRIDE
