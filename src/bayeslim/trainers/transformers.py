"""The Trainer of Hugging Face: a model whose output is the loss of a Bayesian network, and a callback.

    model = TrainerModel(bnn)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(bnn.optimizer(1e-3), None),
                      callbacks=[BayesianCallback()], compute_metrics=scores)
    trainer.train()
    bl.predict(bnn, inputs)

`eval_loss` is the negative log-likelihood of averaged predictions, and `scores` adds their error and calibration. The
arguments need `remove_unused_columns=False`: the Trainer would look for the columns in the signature of our model.

The callback writes the networks that were taken so far into each checkpoint of the Trainer. A run that is resumed finds
them there, so the checkpoint must be in its `output_dir`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, MissingExtra
from bayeslim.io.storage import INDEX, read_folder, write_folder
from bayeslim.metrics import Classification
from bayeslim.predict.predict import predict
from bayeslim.trainers.following import Following, has_posterior

try:
    from transformers.trainer_callback import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise MissingExtra("transformers", "huggingface", "bayeslim.trainers.transformers") from error

COLLECTED = "collected"
"""The folder inside a checkpoint, and the kind of its content."""


class TrainerModel(nn.Module):
    """A Bayesian network as the Trainer calls it: with labels, and a loss in the output.

    In training mode the output has the loss alone. In evaluation mode it has `logits`, the logarithms of averaged
    probabilities (the means of values), and with labels a `loss`, their negative log-likelihood.

    Args:
        bnn: the network.
        samples: networks to average in evaluation mode.
    """

    accepts_loss_kwargs = False
    """The loss is a mean over the batch: the Trainer divides it by the number of accumulated batches."""

    def __init__(self, bnn: Bayesian, samples: int | None = None):
        super().__init__()
        self.bnn, self.samples = bnn, samples

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
        """Compute the loss of a batch, or its averaged prediction."""
        if self.training:
            return {"loss": self.bnn.loss({**inputs, "labels": labels})}
        found = predict(self.bnn, inputs, self.samples, "auto" if has_posterior(self.bnn) else "mean")
        if found.kind != "classes":
            loss = {} if labels is None else {"loss": -self._log_density(found.samples, labels).mean()}
            return {**loss, "logits": found.mean}
        assert found.probs is not None
        logits = found.probs.clamp_min(torch.finfo(found.probs.dtype).tiny).log()
        if labels is None:
            return {"logits": logits}
        ignored = getattr(self.bnn.likelihood, "ignore_index", -100)
        nll = nn.functional.nll_loss(
            logits.flatten(0, -2), labels.flatten(), ignore_index=-100 if ignored is None else ignored
        )
        return {"loss": nll, "logits": logits}

    def _log_density(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the log of the averaged density, (B,)."""
        each = torch.stack([self.bnn.likelihood.log_prob(one, labels) for one in outputs])
        return each.logsumexp(0) - torch.tensor(len(each)).log()


class BayesianCallback(TrainerCallback):
    """Counting of steps in the Trainer, and the posterior at the end.

    Attributes:
        run: the run that is followed, once training has begun.
    """

    run: Following | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
        train_dataloader: Any = None, **rest: Any,
    ) -> None:  # fmt: skip
        """Read the size of the data, and begin to count steps."""
        bnn = next((module for module in model.modules() if isinstance(module, Bayesian)), None)
        if bnn is None:
            raise BayeslimError("BayesianCallback needs a Bayesian network: pass Trainer(model=TrainerModel(bnn)).")
        if args.remove_unused_columns:
            raise BayeslimError(
                "The Trainer would remove the columns that the signature of TrainerModel does not name. Pass "
                "TrainingArguments(remove_unused_columns=False)."
            )
        bnn.step = state.global_step
        folder = _checkpoint(args, state) / COLLECTED
        resumes = state.global_step > 0 and (folder / INDEX).is_file()
        self.run = Following(
            bnn, train_dataloader, optimizer, total=state.max_steps, accumulate=args.gradient_accumulation_steps,
            done=state.global_step, collected=read_folder(folder, (COLLECTED,))[2] if resumes else None,
        )  # fmt: skip

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the networks taken so far into the checkpoint."""
        folder = _checkpoint(args, state)
        if self.run is not None and state.is_world_process_zero and folder.is_dir():
            write_folder(folder / COLLECTED, COLLECTED, {}, self.run.collected())

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Find the posterior."""
        if self.run is not None:
            self.run.finish()


def _checkpoint(args: Any, state: Any) -> Path:
    """Return the folder of the checkpoint at the present step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def scores(evaluated: Any) -> dict[str, float]:
    """Compute error, NLL and calibration error of classes.

    Pass it to the Trainer as `compute_metrics=scores`.

    Args:
        evaluated: the Trainer's predictions, log-probabilities of `TrainerModel`, and labels.
    """
    logits, labels = (torch.as_tensor(part) for part in (evaluated.predictions, evaluated.label_ids))
    told = labels != -100
    meter = Classification()
    meter.update(logits.double().softmax(-1)[told], labels[told])
    found = meter.compute()
    return {"error": found.error, "nll": found.nll, "ece": found.ece}
