"""Sparse Variational Dropout and gates on units, against magnitude pruning.

    python benchmarks/sparse_posteriors.py --device cuda --workers 12         everything, on a GPU
    python benchmarks/sparse_posteriors.py --networks lenet_300_100 --seeds 1  a part of it

For each network and seed, a dense network is trained first. The recipe `bl.recipes.sparse_vd` makes it sparse. The
threshold on log α is chosen on validation images: the sparsest of a few that costs at most `MAX_POINTS_LOST` there. The
remaining weights are fine-tuned with zeros kept at zero. The magnitude rule cuts the same dense network to the same
number of weights with the same schedule: as many epochs, the same learning rates, gradual cuts (Zhu & Gupta 2017) while
the KL is warmed up, and the same fine-tuning. Nothing is chosen on test images. Finished runs are kept in the results
and not repeated.

The rule "units" cuts units instead, by `bl.recipes.bottleneck`, and by the smallest norms for comparison. Both networks
are fine-tuned in three ways, each from the network after the cut: on the labels; "taught", on the dense network's
probabilities as well; and "shifted", on images moved by up to a pixel, where the dense network is fine-tuned, too. The
rule "weights, shifted" is Sparse Variational Dropout with shifted fine-tuning.

The "augmented" rules train on moved images throughout: the dense network, the sparse posterior and fine-tuning, in
which the dense network teaches as well. Magnitude is trained in the same way. These rules were fixed before any of
their networks was tested, except the prices of units (README.md says how they were chosen). They run on two splits: the
official one, and a "fresh" one whose test images no earlier result was measured on.

The "gentle" rules are the same with less pressure, and aim at the goals' sizes instead of the published ones. All of
them were fixed before the third split, "unseen", was made. No other rule was ever measured on its test images.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import captured
import torch
from environment import RESULTS, save
from jobs import finished, result_of
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.distill.divergences import divergence
from bayeslim.train.fit import fit

THRESHOLDS = (3.0, 2.0, 1.0, 0.0, -1.0)
MAX_POINTS_LOST = 0.05
VALIDATION_IMAGES = 5_000

DEFAULTS: dict[str, Any] = {"batch": 250, "dense_epochs": 20, "lr": 1e-3, "tune_lr": 5e-4}
CIFAR: dict[str, Any] = {"data": "cifar10", "dense_epochs": 25, "epochs": 25, "tune_epochs": 20, "temperature": 0.1}
BOTTLENECK = bl.recipes.bottleneck()
UNITS: dict[str, Any] = {
    "data": "mnist",
    "epochs": BOTTLENECK.fit["epochs"],
    "tune_epochs": BOTTLENECK.fine_tune["epochs"],
    "tune_lr": BOTTLENECK.fine_tune["lr"],
    "gate": repr(bl.gates.InformationBottleneck(strength=0.1, per="weight")),
}
"""One recipe for both networks."""
TEACHER_TEMPERATURE, TEACHER_WEIGHT = 2.0, 0.9
"""The temperature of the teacher's probabilities, and their weight in the loss; labels have the rest."""
AUGMENTED: dict[str, Any] = {"data": "mnist", "shift": 1, "dense_epochs": 60, "tune_epochs": 80, "tune_lr": 1e-3}
LONGER = AUGMENTED | {"dense_epochs": 100}
"""LeNet-300-100 needs more epochs to learn moved images."""
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "weights": {
        "lenet_300_100": {"data": "mnist", "epochs": 100, "tune_epochs": 30},
        "lenet5": {"data": "mnist", "epochs": 100, "tune_epochs": 30},
        "lstm": {"data": "mnist", "epochs": 60, "tune_epochs": 15},
        "vgg": CIFAR,
        "vgg_wide": CIFAR,
    },
    "units": {"lenet_300_100": UNITS, "lenet5": UNITS},
    "weights, shifted": {
        "lenet5": {"data": "mnist", "epochs": 170, "tune_epochs": 60, "tune_lr": 1e-3, "tune_shift": 1},
    },
    "weights, augmented": {
        "lenet5": AUGMENTED | {"epochs": 200, "temperature": 2.0, "teaching": "tuning"},
        "lenet_300_100": LONGER | {"epochs": 100, "temperature": 2.5, "teaching": "tuning"},
    },
    "units, augmented": {
        "lenet5": AUGMENTED | {"epochs": 100, "strength": (0.4, 0.5, 0.6, 0.7), "teaching": "throughout"},
        "lenet_300_100": LONGER | {"epochs": 100, "strength": (0.28, 0.32, 0.36), "teaching": "throughout"},
    },
    "weights, gentle": {
        "lenet5": AUGMENTED | {"epochs": 200, "temperature": 1.25, "teaching": "tuning"},
        "lenet_300_100": LONGER | {"epochs": 100, "temperature": 2.0, "teaching": "throughout"},
    },
    "units, gentle": {
        "lenet5": AUGMENTED | {"epochs": 100, "strength": (0.28,), "teaching": "throughout"},
        "lenet_300_100": LONGER | {"epochs": 100, "strength": (0.24,), "teaching": "throughout"},
    },
    "random labels": {
        "lenet_300_100": {"data": "mnist", "epochs": 40, "dense_epochs": 200},
        "vgg": {"data": "cifar10", "epochs": 25, "lr": 2e-3, "dense_epochs": 40, "dense_lr": 1e-4},
    },
}
NETWORKS: dict[str, dict[str, Any]] = {
    "lenet_300_100": {"name": "lenet_300_100"},
    "lenet5": {"name": "lenet5"},
    "lstm": {"name": "lstm"},
    "vgg": {"name": "vgg"},
    "vgg_wide": {"name": "vgg", "width": 2.0},
}
SEEDS = {"vgg": 1, "vgg_wide": 1, "lstm": 1, "fresh": 3}
"""The largest number of seeds, by network or split."""

SPLITS: dict[str, dict[str | None, tuple[float, ...] | None]] = {
    "augmented": {"official": None, "fresh": (0.28, 0.32, 0.5, 0.7), "unseen": (0.32, 0.5)},
    "gentle": {"unseen": None},
}
"""The splits of rules, by the end of their names, and the prices on each: all (None), or those chosen before. Other
rules run on the official split."""

Job = dict[str, Any]
Show = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def moved(x: Tensor, by: int, mirror: bool) -> Tensor:
    """Shift each image at random by up to `by` pixels, and mirror it at random."""
    count, channels, height, width = x.shape
    padded = nn.functional.pad(x, [by] * 4)
    down, right = torch.randint(0, 2 * by + 1, (2, count, 1), device=x.device)
    across = torch.arange(width, device=x.device).expand(count, width)
    mirrored = torch.rand(count, 1, device=x.device) < 0.5 * mirror
    rows = (down + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (right + torch.where(mirrored, width - 1 - across, across))[:, None, None, :]
    examples = torch.arange(count, device=x.device)[:, None, None, None]
    return padded[examples, torch.arange(channels, device=x.device)[None, :, None, None], rows, columns]


def shown(
    x: Tensor, y: Tensor, by: int = 0, mirror: bool = False, teacher: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Move the images of a batch; put a teacher's probabilities before the labels."""
    x = moved(x, by, mirror) if by else x
    if teacher is None:
        return x, y
    with torch.no_grad():
        told = teacher(x).softmax(1)
    return x, torch.cat([told, y[:, None].to(told)], 1)


class Shown:
    """The batches of a loader, augmented for a training step."""

    def __init__(self, loader: bl.data.Loader, show: Show):
        self.loader, self.dataset, self.show = loader, loader.dataset, show

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.show(x, y) for x, y in self.loader)  # type: ignore[arg-type]


class Run:
    """The data and the steps of one network and seed."""

    def __init__(self, job: Job):
        self.job, self.device = job, job["device"]
        data = split(job["data"], job.get("split", "official"))
        self.scale = scale = _scale(job["data"], data.train_x)
        images, labels = data.train_x, data.train_y
        if job["rule"] == "random labels":
            labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(job["seed"]))]
        self.loader = bl.data.Loader(
            scale(images), labels, job["batch"], device=self.device, seed=job["seed"], drop_last=True
        )
        self.valid = scale(data.valid_x).to(self.device), data.valid_y.to(self.device)
        self.test = scale(data.test_x).to(self.device), data.test_y.to(self.device)
        self.taught = self.loader.dataset.x[:10_000], self.loader.dataset.y[:10_000]
        colours = job["data"] == "cifar10"
        self.options: dict[str, Any] = {"autocast": torch.bfloat16 if colours and self.device != "cpu" else None}
        self.moves: dict[str, Any] = {"by": job.get("shift", 0)}
        if colours and job["rule"] != "random labels":
            self.moves = {"by": 4, "mirror": True}

    def train(
        self, bnn: bl.Bayesian, epochs: int, lr: float, schedule: Any, show: Show | None = None, **options: Any
    ) -> bl.Bayesian:
        """Fit by gradient descent with the run's seed; on a GPU as a CUDA graph, of VGG compiled as well."""
        options |= {"epochs": epochs, "lr": lr, "lr_schedule": schedule, "seed": self.job["seed"], **self.options}
        show = show or partial(shown, **self.moves)
        large = self.job["network"].startswith("vgg") and "each_epoch" not in options
        if self.device != "cpu" and not large:
            return captured.train(bnn, self.loader, shown=show, **options)
        options["compile"] = True if self.device != "cpu" else "auto"
        each_epoch = options.pop("each_epoch", None)
        if each_epoch is not None:
            options["callbacks"] = [lambda epoch: each_epoch(epoch.number)]
        if make := options.pop("optimizer", None):
            options["optimizer"] = make(list(bnn.parameters()), lr)
        fit(bnn, Shown(self.loader, show), progress=False, **options)
        return bnn

    def dense(self, network: nn.Module | None = None) -> nn.Module:
        """Train the dense network as usual."""
        torch.manual_seed(self.job["seed"])
        network = bl.zoo.create(**NETWORKS[self.job["network"]]) if network is None else network
        random = self.job["rule"] == "random labels"
        if random or self.job["data"] == "mnist":
            weak, usual = 1e3, 0.3  # weight decay keeps a network from learning noise
            bnn = plain(network.to(self.device), weak if random else usual)
            return self.train(bnn, self.job["dense_epochs"], self.job.get("dense_lr", 1e-3), "cosine").model
        bnn = plain(network.to(self.device, memory_format=torch.channels_last), 1e3)
        return self.train(bnn, self.job["dense_epochs"], 0.1, one_cycle, optimizer=sgd).model

    def posterior(self, network: nn.Module, teacher: nn.Module | None = None) -> bl.Bayesian:
        """Train Sparse Variational Dropout, or gates on units, from the dense network."""
        job = self.job
        epochs = job["epochs"]
        recipe = bl.recipes.sparse_vd(epochs, temperature=job.get("temperature", 1.0))
        method, prior = recipe.method, recipe.prior
        if job["rule"] == "random labels":  # from scratch: there is nothing to learn before the KL counts
            method = bl.Variational(bl.families.SparseGaussian())
        elif job["rule"].startswith("units"):
            recipe = bl.recipes.bottleneck(epochs=epochs)
            gate = bl.gates.InformationBottleneck(strength=job.get("strength", 0.1), per="weight")
            method, prior = dataclasses.replace(recipe.method, gates=gate), recipe.prior
        bnn = bl.bayesianize(network, method, likelihood=likelihood(teacher), prior=prior)
        return self.train(bnn, epochs, job["lr"], "half-then-linear", self.lesson(teacher))

    def slim(self, bnn: bl.Bayesian) -> nn.Module:
        """Compact the network without the units whose gates are closed.

        LeNet-300-100 also drops the pixels that it no longer reads. LeNet-5 keeps all positions of the remaining
        feature maps, for fine-tuning to use again: without them it is smaller and much worse.
        """
        pruned = bl.prune(bnn, bl.Budget(threshold=1e-12), criterion="magnitude")
        pixels = self.job["network"] == "lenet_300_100"
        return bl.compact(pruned.cpu(), self.valid[0][:4].cpu(), drop_inputs=pixels).to(self.device)

    def tuned(
        self, network: nn.Module, masks: dict[str, Tensor], shift: int = 0, teacher: nn.Module | None = None
    ) -> nn.Module:
        """Fine-tune the remaining weights, on shifted images or with a teacher if given."""
        bnn = plain(network, 1.0, teacher)
        bnn.masks = masks
        lesson = self.lesson(teacher, shift)
        return self.train(bnn, self.job["tune_epochs"], self.job["tune_lr"], "cosine", lesson).model

    def teachers(self, dense: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the teacher in fine-tuning, and the teacher in sparse training."""
        teaching = self.job.get("teaching")
        return dense if teaching else None, dense if teaching == "throughout" else None

    def lesson(self, teacher: nn.Module | None, shift: int = 0) -> Show:
        """Make the augmentation of a step: moved images, and a teacher's probabilities."""
        moves = {"by": shift} if shift else self.moves
        return partial(shown, **moves, teacher=None if teacher is None else teacher.eval())

    def cut(self, bnn: bl.Bayesian) -> tuple[bl.Bayesian, float, list[dict[str, float]]]:
        """Make the largest cut that costs at most `MAX_POINTS_LOST` on validation images."""
        tried: list[dict[str, float]] = []
        best: tuple[bl.Bayesian, float] | None = None
        for threshold in THRESHOLDS:
            try:
                pruned = bl.prune(bnn, bl.Budget(threshold=-threshold), criterion="log_alpha")
            except bl.errors.BayeslimError:
                break  # a layer would be empty
            network = pruned.mean_network()
            left = sum(nonzeros(network).values())
            tried.append({"log_alpha": threshold, "nonzeros": left, "valid_error": self.error(network, "valid")})
            if best is None or tried[-1]["valid_error"] <= tried[0]["valid_error"] + MAX_POINTS_LOST:
                best = pruned, threshold
        assert best is not None
        return *best, tried

    def by_magnitude(self, network: nn.Module, keep: int, teacher: nn.Module | None = None) -> bl.Bayesian:
        """Cut the smallest weights gradually until `keep` are left: the baseline."""
        bnn, epochs = plain(network, 1.0, teacher), self.job["epochs"]
        weights = {name: p for name, p in bnn.model.named_parameters() if p.ndim > 1}
        total = sum(p.numel() for p in weights.values())

        bnn.masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in weights.items()}

        def shrink(epoch: int) -> None:
            done = min(1.0, max(0.0, (epoch / epochs - 0.05) / 0.45))
            left = round(total - (total - keep) * (1 - (1 - done) ** 3))
            sizes = torch.cat([p.detach().abs().flatten() for p in weights.values()])
            smallest = sizes.topk(left).values[-1]
            for name, p in weights.items():
                bnn.masks[name].copy_(p.detach().abs() >= smallest)
            bnn.keep_zeros()

        lesson = self.lesson(teacher)
        return self.train(bnn, epochs, self.job["lr"], "half-then-linear", lesson, each_epoch=shrink)

    def by_norm(
        self, network: nn.Module, shapes: dict[str, tuple[int, ...]], teacher: nn.Module | None = None
    ) -> bl.Bayesian:
        """Cut the units of smallest norm gradually, down to `shapes`: the baseline."""
        bnn, epochs = plain(network, 1.0, teacher), self.job["epochs"]
        names = [name for name, p in bnn.model.named_parameters() if p.ndim > 1]
        weights = [bnn.model.get_parameter(name) for name in names]
        bnn.masks = {name: torch.ones_like(bnn.model.get_parameter(name), dtype=torch.bool) for name in names}

        def shrink(epoch: int) -> None:
            done = min(1.0, max(0.0, (epoch / epochs - 0.05) / 0.45))
            alive = [_largest(weights[0].detach().transpose(0, 1), None, shapes[names[0]][1], done)]
            for k, weight in enumerate(weights):
                outgoing = weights[k + 1].detach() if k + 1 < len(weights) else None
                alive.append(_largest(weight.detach(), outgoing, shapes[names[k]][0], done))
            for k, (name, weight) in enumerate(zip(names, weights, strict=True)):
                read = alive[k].repeat_interleave(weight.shape[1] // len(alive[k]))
                both = alive[k + 1][:, None] & read
                bnn.masks[name].copy_(both.view(*both.shape, *[1] * (weight.ndim - 2)).expand_as(weight))
            bnn.keep_zeros()

        lesson = self.lesson(teacher)
        return self.train(bnn, epochs, self.job["lr"], "half-then-linear", lesson, each_epoch=shrink)

    def folder(self, cut: str = "") -> Path:
        """Name the folder of a network by network, rule, price, split, cut and seed."""
        job = self.job
        rule = job["rule"].removeprefix("weights").replace(", ", "-").strip("-")
        split = job.get("split", "").removeprefix("official")
        return Path(job["runs"]) / "-".join(
            filter(None, (job["network"], rule, str(job.get("strength", "")), split, cut, str(job["seed"])))
        )

    @torch.no_grad()
    def error(self, network: nn.Module, part: str) -> float:
        """Compute the error in per cent."""
        network.eval()
        x, y = getattr(self, part)
        wrong = sum(int((network(a).argmax(1) != b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
        return round(100 * wrong / len(y), 3)


def _largest(incoming: Tensor, outgoing: Tensor | None, keep: int, done: float) -> Tensor:
    """Mask the units of largest norm, as many as the cubic schedule keeps at `done`."""
    count = len(incoming)
    squares = incoming.flatten(1).square().sum(1)
    if outgoing is not None:
        squares = squares + outgoing.transpose(0, 1).reshape(count, -1).square().sum(1)
    left = round(count - (count - keep) * (1 - (1 - done) ** 3))
    return squares >= squares.topk(left).values[-1]


def split(name: str, which: str) -> bl.data.Dataset:
    """Load a split of the images, with some held out for validation.

    In the "fresh" and "unseen" splits the test images come from the training set, and no result had been measured on
    them before these splits were made. The official test images train the networks in their place. Validation images
    are the same.
    """
    data = bl.data.load(name).with_validation(VALIDATION_IMAGES, seed=0)
    if which == "official":
        return data
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(1))
    parts = list(order.split(len(data.test_x)))
    test = parts.pop(("fresh", "unseen").index(which)).sort().values
    rest = torch.cat(parts).sort().values
    return dataclasses.replace(
        data,
        train_x=torch.cat([data.train_x[rest], data.test_x]),
        train_y=torch.cat([data.train_y[rest], data.test_y]),
        test_x=data.train_x[test],
        test_y=data.train_y[test],
    )


def _scale(name: str, images: Tensor) -> Any:
    """Return the scaling: MNIST stays in [0, 1]; colours are standardised."""
    if name == "mnist":
        return lambda x: x
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    return lambda x: (x - mean) / std


def sgd(parameters: list[Any], rate: Any) -> torch.optim.Optimizer:
    """Make SGD with momentum, and weight decay on weights."""
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == w], "weight_decay": 5e-4 * w} for w in (True, False)]
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True, fused=True)


def one_cycle(done: float) -> float:
    """Raise the learning rate in the first fifth, then lower it to zero."""
    return 5 * done if done < 0.2 else 1.25 * (1 - done)


class Taught(bl.likelihoods.Categorical):
    """A likelihood whose targets are a teacher's probabilities, then the label."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Weigh the label's log-likelihood and the divergence from the teacher."""
        told, labels = targets[:, :-1], targets[:, -1].long()
        away = divergence(bl.likelihoods.Categorical(), outputs, told, TEACHER_TEMPERATURE)
        return (1 - TEACHER_WEIGHT) * super().log_prob(outputs, labels) - TEACHER_WEIGHT * away

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Average over examples."""
        return -self.log_prob(outputs, targets).mean()


def likelihood(teacher: nn.Module | None) -> bl.likelihoods.Likelihood:
    """Make the likelihood of labels, and of a teacher's probabilities if given."""
    return bl.likelihoods.Categorical() if teacher is None else Taught()


def plain(network: nn.Module, prior_std: float, teacher: nn.Module | None = None) -> bl.Bayesian:
    """Wrap a network for usual training, with weight decay from a Normal prior."""
    method, prior = bl.Laplace(structure="diag"), bl.priors.Normal(prior_std)
    return bl.bayesianize(network, method, likelihood=likelihood(teacher), prior=prior)


def nonzeros(network: nn.Module) -> dict[str, int]:
    """Count the non-zeros of every weight."""
    return {name: int((p != 0).sum()) for name, p in network.named_parameters() if p.ndim > 1}


def run(job: Job) -> Job:
    """Run all steps of a job."""
    torch.set_num_threads(1)
    os.environ["BAYESLIM_PROGRESS"] = "0"
    started, steps = time.monotonic(), Run(job)
    result = {**job, **RULES[job["rule"]](steps)}
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def weights(steps: Run) -> Job:
    """Run Sparse Variational Dropout and magnitude.

    The result of the first is saved, so that a run that was interrupted after it resumes there.
    """
    job, dense, shift = steps.job, steps.dense(), steps.job.get("tune_shift", 0)
    teacher, early = steps.teachers(dense)
    kept = steps.folder().with_suffix(".json")
    result = result_of(job, [json.loads(kept.read_text())]) if kept.exists() else None
    if result is None:
        result = job | sparse_weights(steps, dense)
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(kept)
    result["dense"] = errors(steps, dense)
    if shift:
        result["dense_tuned"] = errors(steps, steps.tuned(dense, {}, shift))
    if job.get("baseline", True):
        cut = steps.by_magnitude(dense, result["left"], early)
        network = steps.tuned(cut.model, cut.masks, shift, teacher)
        result["magnitude"] = errors(steps, network)
        bl.save(network.cpu(), steps.folder("magnitude"))
    return result


def sparse_weights(steps: Run, dense: nn.Module) -> Job:
    """Run Sparse Variational Dropout from a dense network, and save the result."""
    teacher, early = steps.teachers(dense)
    total = sum(p.numel() for p in dense.parameters() if p.ndim > 1)
    pruned, threshold, tried = steps.cut(steps.posterior(dense, early))
    tuned = steps.tuned(pruned.mean_network(), pruned.masks, steps.job.get("tune_shift", 0), teacher)
    left = nonzeros(tuned)
    keep = sum(left.values())
    result: Job = {"weights": total, "left": keep, "compression": round(total / keep, 1)}
    result |= {"tried": tried, "log_alpha": threshold, "nonzeros": left, "sparse": errors(steps, tuned)}
    bl.save(tuned.cpu(), steps.folder())
    return result


def units(steps: Run) -> Job:
    """Cut units by gates and by norms, and fine-tune in three ways or in one."""
    dense = steps.dense()
    teacher, early = steps.teachers(dense)
    total = sum(p.numel() for p in dense.parameters() if p.ndim > 1)
    slim = steps.slim(steps.posterior(dense, early))
    shapes = {name: tuple(p.shape) for name, p in slim.named_parameters() if p.ndim > 1}
    left = sum(math.prod(shape) for shape in shapes.values())
    cut = steps.by_norm(dense, shapes, early)
    result: Job = {"weights": total, "left": left, "compression": round(total / left, 1), "shapes": shapes}
    result["dense"] = errors(steps, dense)
    ways: dict[str, dict[str, Any]] = {"": {}, "taught": {"teacher": dense}, "shifted": {"shift": 1}}
    if teacher is not None:
        ways = {"": {"teacher": teacher}}
    for way, options in ways.items():
        tuned = steps.tuned(slim, {}, **options)
        norms = steps.tuned(cut.model, cut.masks, **options)
        found = {"sparse": errors(steps, tuned), "magnitude": errors(steps, norms)}
        if way == "shifted":
            found["dense"] = errors(steps, steps.tuned(dense, {}, **options))
        result |= {way: found} if way else found
        bl.save(tuned.cpu(), steps.folder(way))
    return result


def random_labels(steps: Run) -> Job:
    """Train on random labels: by Sparse Variational Dropout, and with dropout."""
    job = steps.job
    torch.manual_seed(job["seed"])
    network = bl.zoo.create(**NETWORKS[job["network"]]).to(steps.device)
    bnn = steps.posterior(network)
    mean = bnn.mean_network()
    left = nonzeros(mean)
    total = sum(p.numel() for p in network.parameters() if p.ndim > 1)
    found = {"weights": total, "nonzeros": left, "pruned": round(100 * (1 - sum(left.values()) / total), 4)}
    found["taught_error"], found["valid_error"] = steps.error(mean, "taught"), steps.error(mean, "valid")
    dropout = steps.dense(with_dropout(job["network"]))
    return found | {"dropout_taught_error": steps.error(dropout, "taught")}


def with_dropout(network: str) -> nn.Module:
    """Build the network with dropout of 0.2 before its linear layers."""
    if network == "lenet_300_100":
        return bl.zoo.create("mlp", hidden=1200, dropout=0.2)
    layers = bl.zoo.create(**NETWORKS[network]).children()
    return nn.Sequential(*[part for layer in layers for part in _dropping(layer)])


def _dropping(layer: nn.Module) -> list[nn.Module]:
    return [nn.Dropout(0.2), layer] if isinstance(layer, nn.Linear) else [layer]


RULES = {
    "weights": weights,
    "units": units,
    "weights, shifted": weights,
    "weights, augmented": weights,
    "units, augmented": units,
    "weights, gentle": weights,
    "units, gentle": units,
    "random labels": random_labels,
}


def errors(steps: Run, network: nn.Module) -> dict[str, float]:
    """Compute the errors on the validation and the test images."""
    return {part: steps.error(network, part) for part in ("valid", "test")}


def jobs_of(rule: str, network: str, seeds: int) -> list[Job]:
    """List all runs of a rule on a network, for each price."""
    settings = {**DEFAULTS, **SETTINGS[rule][network], "rule": rule, "network": network}
    prices = [{"strength": price} for price in settings.get("strength", ())]
    return [
        settings | ({"split": split} if split else {}) | price | {"seed": seed}
        for split, chosen in SPLITS.get(rule.split(", ")[-1], {None: None}).items()
        for price in prices or [{}]
        if not price or chosen is None or price["strength"] in chosen
        for seed in range(min(seeds, SEEDS.get(network, seeds), SEEDS.get(split or "", seeds)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/sparse_posteriors"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    jobs = [
        job | {"device": options.device, "runs": str(options.runs)}
        for rule in options.rules
        for network in SETTINGS[rule]
        if network in options.networks
        for job in jobs_of(rule, network, options.seeds)
    ]
    path = options.results / "sparse_posteriors.json"
    done = json.loads(path.read_text())["runs"] if path.exists() else []

    def keep(result: Job) -> None:
        save("sparse_posteriors", {"command": command, "runs": done}, folder=options.results)
        shown = ("rule", "network", "seed", "compression", "pruned", "seconds")
        print(json.dumps({k: result[k] for k in shown if k in result}), flush=True)

    command = f"python benchmarks/sparse_posteriors.py --device {options.device} --seeds {options.seeds}"
    rows = finished(run, jobs, done, options.workers, keep)
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for row in (row for row in rows if row["rule"] != "random labels"):
        groups.setdefault(tuple(row.get(key, "") for key in ("rule", "network", "split", "strength")), []).append(row)
    for group, found in groups.items():
        for way in ("", "taught", "shifted"):
            if ways := [{**row, **(row[way] if way else {})} for row in found if not way or way in row]:
                print(*group, way, json.dumps(summary(ways)))
    for row in rows:
        if row["rule"] == "random labels":
            print("random labels", row["network"], {k: v for k, v in row.items() if "error" in k or k == "pruned"})


def summary(rows: list[Job]) -> dict[str, float]:
    """Average over seeds; compression is all weights over the mean of those left."""
    left = statistics.mean(row["left"] for row in rows)
    found = {"compression": round(rows[0]["weights"] / left, 1)}
    for rule in ("dense", "sparse", "magnitude"):
        errors = [row[rule]["test"] for row in rows]
        found[rule] = round(statistics.mean(errors), 3)
        if len(rows) > 1:
            found[f"{rule}_spread"] = round(statistics.stdev(errors), 3)
    return found


if __name__ == "__main__":
    main()
