"""Lightning: a callback for modules that train by `bnn.loss`, and a module for networks without one.

    class Digits(lightning.LightningModule):              trainer = lightning.Trainer(callbacks=[BayesianCallback()])
        def __init__(self, bnn): ...                      trainer.fit(Digits(bnn), train_loader, val_loader)
        def training_step(self, batch, index):            bl.predict(bnn, x)
            return self.bnn.loss(batch)

The callback counts steps, logs the data term and the KL, measures averaged predictions in validation, and finds the
posterior at the end of training (`bayeslim.trainers.following`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, MissingExtra
from bayeslim.trainers.following import Following, Meter

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtra("lightning", "lightning", "bayeslim.trainers.lightning") from error


class BayesianCallback(Callback):
    """Training of a Bayesian network inside a LightningModule.

    It logs `train_nll` and `train_kl` at every step, and in validation `val_nll`, with `val_error` and `val_ece` for
    classes and yes/no targets or `val_rmse` for values and counts: scores of averaged predictions, or of the mean
    network until the posterior is found. Checkpoints hold the networks that were taken so far.

    Args:
        bnn: the network; the first `Bayesian` inside the module if not given.
        samples: networks to average in validation.
    """

    def __init__(self, bnn: Bayesian | None = None, samples: int | None = None):
        self.bnn, self.samples = bnn, samples
        self.run: Following | None = None
        self.meter: Meter | None = None
        self.saved: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the network in the module; a checkpoint is loaded afterwards."""
        if stage == "fit":
            self.run, self.saved = None, {}
        if self.bnn is None:
            self.bnn = next((module for module in pl_module.modules() if isinstance(module, Bayesian)), None)
        if self.bnn is None:
            raise BayeslimError(
                f"BayesianCallback needs a Bayesian network. {type(pl_module).__name__} holds none: make one with "
                "bl.bayesianize(network, method, likelihood=...) and set it as an attribute of the module."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the size of the data, and begin to count steps."""
        assert self.bnn is not None
        precision = trainer.precision_plugin
        loader = _Converted(trainer.train_dataloader, precision.convert_input, trainer.num_training_batches)
        total = trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise BayeslimError("The number of training steps must be known. Give the Trainer max_epochs or max_steps.")
        # the trainer counts the step of every optimizer
        done = int(self.saved.get("step", trainer.global_step // max(1, len(trainer.optimizers))))
        self.bnn.step = done
        self.run = Following(
            self.bnn, loader, trainer.optimizers, total=int(total), accumulate=trainer.accumulate_grad_batches,
            done=done, collected=self.saved.get("collected"),
        )  # fmt: skip
        self.saved = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the terms of the loss."""
        assert self.bnn is not None
        if self.bnn.terms is not None:
            pl_module.log_dict({"train_nll": self.bnn.terms.nll, "train_kl": self.bnn.terms.kl})

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the scores of the last epoch."""
        assert self.bnn is not None
        self.meter = Meter(self.bnn, self.samples)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure a batch of the first validation loader."""
        if self.meter is not None and dataloader_idx == 0:
            self.meter.update(batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores."""
        assert self.meter is not None
        scores = {f"val_{name}": value for name, value in self.meter.compute().items()}
        pl_module.log_dict(scores, sync_dist=trainer.world_size > 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the posterior."""
        if self.run is not None:
            self.run.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training and the networks taken, for a checkpoint."""
        return self.saved if self.run is None else {"step": self.run.done, "collected": self.run.collected()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, with its networks and the schedules of the KL."""
        self.saved = state_dict


class _Converted:
    """A loader whose batches have the precision of the Trainer, for the pass that finds the posterior.

    Its length is the number of batches of an epoch, which `limit_train_batches` may make smaller; a pass reads all.
    """

    def __init__(self, loader: Any, convert: Callable[[Any], Any], batches: Any):
        self.loader, self.convert, self.batches = loader, convert, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        return map(self.convert, self.loader)


class BayesianModule(LightningModule):
    """A LightningModule of a Bayesian network, with its callback.

    Args:
        bnn: the network.
        lr: the learning rate; the default of the method if not given.
        samples: networks to average in validation.
    """

    def __init__(self, bnn: Bayesian, lr: float | None = None, samples: int | None = None):
        super().__init__()
        self.bnn, self.lr, self.samples = bnn, lr, samples

    def forward(self, inputs: Any) -> Tensor:
        """Call one drawn network in training mode, the mean network in evaluation mode."""
        return self.bnn(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of a batch."""
        return self.bnn.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Leave the scores to the callback."""

    def configure_optimizers(self) -> Any:
        """Make the method's own optimizer."""
        return self.bnn.optimizer(self.lr)

    def configure_callbacks(self) -> list[Callback]:
        """Add the callback."""
        return [BayesianCallback(self.bnn, self.samples)]
