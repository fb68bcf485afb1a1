"""The grid of Bayes by Backprop: 324 settings on MNIST, trained side by side on one GPU.

    python benchmarks/bayes_by_backprop_grid.py --device cuda --minutes 9       train, or go on where it stopped
    python benchmarks/grid_table.py                                             write the tables into docs/results.md

    samples {1, 2, 5, 10} · π {1/4, 1/2, 3/4} · −log σ₁ {0, 1, 2} · −log σ₂ {6, 7, 8} · learning rate {1e-3, 1e-4, 1e-5}

Settings with the same number of samples are a stack: 81 networks 784-400-400-10 with parameters (81, *shape). One
vmapped step trains the stack; each network has its own noise, prior and learning rate, and nothing that one
computes depends on another. The step (batch, noise, gradients, Adam) is compiled, and captured as one CUDA graph.
All networks have the same start and see the same minibatches of 128, so that settings are compared in pairs. The loss
of a draw w is the paper's, with its weights of the KL:

    −log p(y|x, w) + kl_weight / N · [log q(w) − log p(w)],     log q(w) = −log σ + const at w = μ + σ ε

The paper trains by SGD, here Adam does, on μ and log σ. 10,000 images are held out for validation. After each part of
the epochs all stacks are measured, on validation and test images, and written to the results file; with `--state` the
whole state is kept too, and the next run goes on from it exactly.

Blundell et al. 2015, arXiv:1505.05424
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import grad, vmap

import bayeslim as bl

NAME = "bayes_by_backprop_grid"
GRID: dict[str, tuple[float, ...]] = {
    "samples": (1, 2, 5, 10),
    "pi": (0.25, 0.5, 0.75),
    "minus_log_sigma1": (0, 1, 2),
    "minus_log_sigma2": (6, 7, 8),
    "lr": (1e-3, 1e-4, 1e-5),
}
BATCH = 128
HELD_OUT = 10_000
PIXEL_SCALE = 255 / 126
"""The paper divides pixels by 126."""
EAGER_STEPS = 3
"""Steps before the capture: they compile, and count as training."""
BETAS = (0.9, 0.999)
EPSILON = 1e-8
ROWS_PER_CHUNK = 1_000
"""Images in one call of a measurement, of all networks of a stack."""

Params = dict[str, Tensor]
Setting = dict[str, float]
Priors = dict[str, bl.priors.ScaleMixture]
"""By the name of a parameter, with π, σ₁ and σ₂ of every network of a stack, to broadcast to draws of it."""


def settings(samples: int) -> list[Setting]:
    """List the settings with a number of samples."""
    names = [name for name in GRID if name != "samples"]
    return [
        {"samples": samples, **dict(zip(names, values, strict=True))}
        for values in itertools.product(*(GRID[name] for name in names))
    ]


def start(units: int, seed: int) -> tuple[Params, Params]:
    """Take means and log σ of a network that the library has just made Bayesian."""
    torch.manual_seed(seed)
    bnn = bl.bayesianize(
        bl.zoo.create("mlp", hidden=units),
        bl.Variational(),
        likelihood=bl.likelihoods.Categorical(),
        prior=bl.priors.ScaleMixture(),
        sites="all",
    )
    own = dict(bnn.model.named_parameters())
    values = {name: value.detach().mT if value.ndim == 2 else value.detach() for name, value in own.items()}
    return {n: values[n] for n in bnn.sites.names}, {n: values[f"{n}_log_std"] for n in bnn.sites.names}


def logits(weights: Params, x: Tensor) -> Tensor:
    """Call one network: three linear layers with rectifiers between them."""
    hidden = F.relu(x @ weights["fc1.weight"] + weights["fc1.bias"])
    hidden = F.relu(hidden @ weights["fc2.weight"] + weights["fc2.bias"])
    return hidden @ weights["fc3.weight"] + weights["fc3.bias"]


def nll_of_draws(weights: Params, x: Tensor, y: Tensor) -> Tensor:
    """Sum the mean NLL of a minibatch over networks, averaged over their draws.

    Args:
        weights: draws of every network, (S, samples, *shape).
        x: a minibatch for all networks.
        y: its classes.
    """
    outputs = vmap(vmap(logits, (0, None)), (0, None))(weights, x)
    log_probs = outputs.log_softmax(-1).gather(-1, y.view(1, 1, -1, 1).expand(*outputs.shape[:-1], 1))
    return -log_probs.sum(0).mean()


def score(prior: bl.priors.ScaleMixture, weights: Tensor) -> Tensor:
    """Compute the gradient of log p(w)."""
    return grad(lambda values: prior.log_prob(values).sum())(weights)


def gradients(
    means: Params, log_stds: Params, weights: Params, priors: Priors, x: Tensor, y: Tensor, kl_share: Tensor
) -> tuple[Params, Params]:
    """Compute the gradients of the loss in means and log σ.

    With g the gradient in a draw w = μ + σ ε they are Σ g and Σ g (w − μ), and that of log q(w) in log σ is −1. The
    noise need not be kept.

    Args:
        means: of the weights, (S, *shape).
        log_stds: alike.
        weights: draws, (S, samples, *shape).
        priors: by the name of a parameter.
        x: a minibatch for all networks.
        y: its classes.
        kl_share: kl_weight / num_data.
    """
    of_nll = grad(nll_of_draws)(weights, x, y)
    of_means, of_log_stds = {}, {}
    for name, drawn in weights.items():
        slopes = of_nll[name] - kl_share / drawn.shape[1] * score(priors[name], drawn)
        of_means[name] = slopes.sum(1)
        of_log_stds[name] = (slopes * (drawn - means[name].unsqueeze(1))).sum(1) - kl_share
    return of_means, of_log_stds


def adam_(value: Tensor, gradient: Tensor, moments: list[Tensor], step: Tensor, lr: Tensor) -> None:
    """Make a step of Adam with a learning rate for every network of a stack."""
    first, second = moments
    first.lerp_(gradient, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    unbiased, squared = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
    value.sub_(lr.view(-1, *[1] * (value.ndim - 1)) * unbiased / (squared.sqrt() + EPSILON))


@dataclass
class Data:
    """Images on the device, flat and scaled as in the paper.

    Attributes:
        parts: (images, classes) of "train", "validation" and "test".
        order: the indices of the minibatches of the present epoch, (steps, BATCH).
        kl_shares: kl_weight / num_data of every step of an epoch.
    """

    parts: dict[str, tuple[Tensor, Tensor]]
    order: Tensor
    kl_shares: Tensor

    @classmethod
    def load(cls, device: str, images: int | None) -> Data:
        """Read MNIST, or its first images for a trial."""
        data = bl.data.load("mnist").with_validation(HELD_OUT, seed=0)
        whole = {
            "train": (data.train_x, data.train_y),
            "validation": (data.valid_x, data.valid_y),
            "test": (data.test_x, data.test_y),
        }
        parts = {
            name: (PIXEL_SCALE * x[:images].flatten(1).to(device), y[:images].to(device))
            for name, (x, y) in whole.items()
        }
        number = len(parts["train"][1])
        steps = number // BATCH
        weights = [bl.schedules.Blundell().weight(bl.schedules.Position(i, steps)) for i in range(steps)]
        order = torch.zeros(steps, BATCH, dtype=torch.int64, device=device)
        return cls(parts, order, torch.tensor(weights, device=device) / number)

    def shuffle(self, epoch: int) -> None:
        """Set the order of an epoch; the same for all stacks and devices."""
        generator = torch.Generator().manual_seed(epoch)
        permutation = torch.randperm(len(self.parts["train"][1]), generator=generator)
        self.order.copy_(permutation[: self.order.numel()].view_as(self.order))


@dataclass
class Stack:
    """Networks with one number of samples, and the state of their training.

    Attributes:
        settings: of every network.
        means: of the weights, (S, *shape); matrices are (inputs, outputs), so that no product needs a transpose.
        log_stds: alike.
        moments: of Adam, for means and for log σ.
        step: steps taken.
        place: steps taken in the epoch.
        device: where they are.
        epochs: epochs done.
        timed_epochs: epochs in `seconds`.
        seconds: the time of training, without preparation.
        preparation: the time of compilation and capture.
        history: measurements of every part.
        graph: the captured step.
    """

    settings: list[Setting]
    means: Params
    log_stds: Params
    moments: list[dict[str, list[Tensor]]]
    step: Tensor
    place: Tensor
    device: str
    epochs: int = 0
    timed_epochs: int = 0
    seconds: float = 0.0
    preparation: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    graph: Any = None

    @classmethod
    def new(cls, own: list[Setting], units: int, device: str) -> Stack:
        """Stack networks that all start at the same point."""
        means, log_stds = (
            {
                name: value.to(device).expand(len(own), *value.shape).clone(memory_format=torch.contiguous_format)
                for name, value in part.items()
            }
            for part in start(units, seed=0)
        )
        moments = [{n: [torch.zeros_like(v) for _ in BETAS] for n, v in part.items()} for part in (means, log_stds)]
        place = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(own, means, log_stds, moments, torch.zeros((), device=device), place, device)

    def column(self, name: str) -> Tensor:
        """Return a setting of every network."""
        return torch.tensor([setting[name] for setting in self.settings], dtype=torch.float32, device=self.device)

    def state(self) -> Params:
        """Name every tensor that the next epoch depends on."""
        found = {"step": self.step}
        for kind, values, moments in zip(("mean", "log_std"), (self.means, self.log_stds), self.moments, strict=True):
            for name, value in values.items():
                found |= {f"{kind} {name}": value}
                found |= {f"{kind} {name} moment {k}": moment for k, moment in enumerate(moments[name])}
        return found

    def priors(self) -> Priors:
        """Make the priors of all networks as one."""
        sigma1, sigma2 = ((-self.column(f"minus_log_sigma{k}")).exp() for k in (1, 2))
        settings = self.column("pi"), sigma1, sigma2
        return {
            name: bl.priors.ScaleMixture(*(setting.view(-1, *[1] * mean.ndim) for setting in settings))
            for name, mean in self.means.items()
        }

    def stepper(self, data: Data, compiled: bool) -> Callable[[], None]:
        """Make the step: a minibatch, draws, gradients and Adam."""
        samples, priors, lr = int(self.settings[0]["samples"]), self.priors(), self.column("lr")
        means, log_stds, moments, step, place = self.means, self.log_stds, self.moments, self.step, self.place
        (images, classes), order, kl_shares = data.parts["train"], data.order, data.kl_shares

        def update() -> None:
            rows = order.index_select(0, place)[0]
            x, y = images.index_select(0, rows), classes.index_select(0, rows)
            weights = {}
            for name, mean in means.items():
                noise = torch.randn(len(mean), samples, *mean.shape[1:], device=mean.device)
                weights[name] = mean.unsqueeze(1) + log_stds[name].exp().unsqueeze(1) * noise
            kl_share = kl_shares.index_select(0, place)[0]
            found = gradients(means, log_stds, weights, priors, x, y, kl_share)
            step.add_(1)
            place.add_(1)
            for kind, values in enumerate((means, log_stds)):
                for name, value in values.items():
                    adam_(value, found[kind][name], moments[kind][name], step, lr)

        return torch.compile(update, dynamic=False, fullgraph=True) if compiled else update

    def train(self, step: Callable[[], None], epoch: int, data: Data) -> None:
        """Train an epoch, by replays of the captured step on a GPU."""
        data.shuffle(epoch)
        self.place.zero_()
        cuda = self.device == "cuda"
        left = len(data.order)
        started = time.monotonic()
        first = cuda and self.graph is None
        if first:
            for _ in range(EAGER_STEPS):
                step()
            left -= EAGER_STEPS
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                step()
            self.preparation = time.monotonic() - started
            started = time.monotonic()
        for _ in range(left):
            if cuda:
                self.graph.replay()
            else:
                step()
        if cuda:
            torch.cuda.synchronize()
        self.seconds += (time.monotonic() - started) * len(data.order) / left
        self.epochs, self.timed_epochs = epoch + 1, self.timed_epochs + 1

    @torch.no_grad()
    def measure(self, data: Data, draws: int) -> None:
        """Measure every network: its mean, and the average of draws, on validation and test images."""
        found: dict[str, Any] = {"epoch": self.epochs}
        stds = {name: log_std.exp() for name, log_std in self.log_stds.items()}
        for part in ("validation", "test"):
            x, y = data.parts[part]
            of_mean = self._probabilities(self.means, x)
            of_draws = torch.zeros_like(of_mean)
            for _ in range(draws):
                weights = {name: mean + stds[name] * torch.randn_like(mean) for name, mean in self.means.items()}
                of_draws += self._probabilities(weights, x) / draws
            found[part] = {"mean": _scores(of_mean, y), "sample": _scores(of_draws, y)}
        self.history.append(found)

    def _probabilities(self, weights: Params, x: Tensor) -> Tensor:
        outputs = [vmap(logits, (0, None))(weights, rows) for rows in x.split(ROWS_PER_CHUNK)]
        return torch.cat(outputs, 1).softmax(-1)


def _scores(probabilities: Tensor, y: Tensor) -> dict[str, list[float | None]]:
    """Compute error in per cent and NLL of every network; None for what is not finite."""
    errors = 100 * (probabilities.argmax(-1) != y).double().mean(1)
    of_class = probabilities.gather(-1, y.expand(len(probabilities), -1).unsqueeze(-1))
    nlls = -of_class.double().clamp_min(1e-30).log().mean((1, 2))
    return {
        name: [round(value, 5) if math.isfinite(value) else None for value in values.tolist()]
        for name, values in (("error", errors), ("nll", nlls))
    }


def results(stacks: list[Stack], options: argparse.Namespace) -> dict[str, Any]:
    """Collect one row for every setting, with its last measurement and its validation errors before."""
    rows = []
    for stack in stacks:
        for index, setting in enumerate(stack.settings):
            last = {
                part: {how: {k: v[index] for k, v in scores.items()} for how, scores in stack.history[-1][part].items()}
                for part in ("validation", "test")
            }
            before = {h["epoch"]: h["validation"]["sample"]["error"][index] for h in stack.history}
            rows.append({**setting, **last, "validation_errors": before})
    per_epoch = {str(int(s.settings[0]["samples"])): s.seconds / max(1, s.timed_epochs) for s in stacks}
    return {
        "command": f"python benchmarks/{NAME}.py --device {options.device}",
        "epochs": min(stack.epochs for stack in stacks),
        "batch": BATCH,
        "units": options.units,
        "draws": options.draws,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "seconds_per_epoch": per_epoch,
        "seconds_of_preparation": {str(int(s.settings[0]["samples"])): s.preparation for s in stacks},
        "seconds_of_600_epochs": 600 * sum(per_epoch.values()),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else None,
        "rows": rows,
    }


def parts_of(epochs: int, done: int, part: int) -> Iterator[range]:
    """Split the epochs that are left into parts."""
    for first in range(done, epochs, part):
        yield range(first, min(epochs, first + part))


def keep(stacks: list[Stack], folder: Path) -> None:
    """Write the whole state of training, under a temporary name first."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{k} {name}": v.contiguous() for k, stack in enumerate(stacks) for name, v in stack.state().items()}
    tensors["random"] = torch.cuda.get_rng_state() if stacks[0].device == "cuda" else torch.get_rng_state()
    progress = [
        {name: getattr(s, name) for name in ("epochs", "timed_epochs", "seconds", "preparation", "history")}
        for s in stacks
    ]
    save_file(tensors, folder / "state.part", {"progress": json.dumps(progress)})
    (folder / "state.part").replace(folder / "state.safetensors")
    (folder / "progress.part").write_text(json.dumps(progress))
    (folder / "progress.part").replace(folder / "progress.json")


def resume(stacks: list[Stack], folder: Path) -> None:
    """Go on from a kept state, if there is one."""
    if not (folder / "progress.json").exists():
        return
    tensors = load_file(folder / "state.safetensors")
    for k, (stack, progress) in enumerate(zip(stacks, json.loads((folder / "progress.json").read_text()), strict=True)):
        for name, value in stack.state().items():
            value.copy_(tensors[f"{k} {name}"])
        for name, value in progress.items():
            setattr(stack, name, value)
    if stacks[0].device == "cuda":
        torch.cuda.set_rng_state(tensors["random"])
    else:
        torch.set_rng_state(tensors["random"])


def main() -> None:
    """Train until the epochs or the minutes are over; measure and save after each part."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--epochs", type=int, default=600)
    parser.add_argument("--part", type=int, default=5, help="epochs between two measurements")
    parser.add_argument("--minutes", type=float, default=60, help="no part begins that would end later")
    parser.add_argument("--draws", type=int, default=16, help="networks whose predictions are averaged")
    parser.add_argument("--samples", type=int, nargs="+", default=GRID["samples"], help="the stacks to train")
    parser.add_argument("--units", type=int, default=400)
    parser.add_argument("--images", type=int, help="only the first images of every part, for a trial")
    parser.add_argument("--networks", type=int, help="only the first settings of every stack, for a trial")
    parser.add_argument("--no-compile", action="store_true", help="capture the step without compiling it")
    parser.add_argument("--state", type=Path, help="a folder for the state of training, to resume from")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results file")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # tensor cores: the products of float32 weights are rounded to TF32
    torch.manual_seed(0)
    data = Data.load(options.device, options.images)
    stacks = [Stack.new(settings(k)[: options.networks], options.units, options.device) for k in options.samples]
    torch.manual_seed(1)
    if options.state is not None:
        resume(stacks, options.state)
    steps = [stack.stepper(data, not options.no_compile) for stack in stacks]
    longest = 0.0
    for part in parts_of(options.epochs, stacks[0].epochs, options.part):
        spent = time.monotonic() - began
        if spent + longest > 60 * options.minutes:
            break
        since = time.monotonic()
        for stack, step in zip(stacks, steps, strict=True):
            for epoch in part:
                stack.train(step, epoch, data)
            stack.measure(data, options.draws)
            least = min(stack.history[-1]["validation"]["sample"]["error"])
            print(
                f"epoch {stack.epochs}, {int(stack.settings[0]['samples'])} samples: validation error {least:.2f} % at "
                f"best, {stack.seconds / stack.timed_epochs:.2f} s an epoch, prepared in {stack.preparation:.0f} s, "
                f"{time.monotonic() - began:.0f} s in all",
                flush=True,
            )
        prepared = sum(stack.preparation for stack in stacks) if not longest else 0.0
        longest = time.monotonic() - since - prepared
        path = save(NAME, results(stacks, options), folder=options.results)
        print(f"Saved {path}", flush=True)
        if options.state is not None:
            keep(stacks, options.state)


if __name__ == "__main__":
    main()
