"""`compress`: from a network and data to a smaller network, files to deploy, and a report.

    fit → prune → fine-tune → compact → magnitude → export → measure → report

Each stage's result is kept in the run's folder, so a run that was stopped goes on with the stage it was in (training
with the epoch it was in).
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from bayeslim.app.benchmark import Benchmark, benchmark
from bayeslim.app.compress import records
from bayeslim.app.compress.baseline import NoBaseline, by_magnitude
from bayeslim.app.compress.folder import ResultIncomplete, RunFolder, run_folder
from bayeslim.app.compress.job import (
    Job,
    check,
    described,
    has_onnx,
    identity,
    options_of,
    prepared,
    readable,
    refuse_with_recipe,
    start_over,
    words,
)
from bayeslim.app.compress.notes import not_faster, too_much, untrained
from bayeslim.app.compress.result import Compressed
from bayeslim.app.report.overview import DENSE, MAGNITUDE, SLIM, latencies, measure_rows
from bayeslim.app.report.report import report
from bayeslim.app.report.scores import collected
from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, NotFitted
from bayeslim.export import export
from bayeslim.export.c.library import find_compiler
from bayeslim.io.saving import load, save
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.base import Method
from bayeslim.priors import PriorSpec
from bayeslim.prune import Budget, Plan, compact, plan, prune
from bayeslim.prune import fine_tune as fine_tuned
from bayeslim.recipes import Recipe
from bayeslim.train.fingerprint import layout
from bayeslim.train.fit import fit as training
from bayeslim.types import Inputs, split_batch

STAGES = (
    "fitted",
    "pruned",
    "tuned",
    "slim",
    MAGNITUDE,
    "exported.json",
    "benchmark.json",
    "measured.json",
    "report.html",
)
SUFFIXES = ("onnx", "pt2", "c", "h")
"""Of the files that the stage of export writes: slim.onnx and so on."""


def compress(
    model: nn.Module | Bayesian,
    train: Any,
    val: Iterable[Any],
    *,
    budget: Budget | Plan | None = None,
    recipe: Recipe | None = None,
    out: str | os.PathLike[str] = "run",
    method: Method | None = None,
    likelihood: Likelihood | None = None,
    prior: PriorSpec | None = None,
    fit: Mapping[str, Any] | None = None,
    granularity: str = "weight",
    criterion: Any = None,
    steps: int | None = None,
    fine_tune: Mapping[str, Any] | None = None,
    test: Iterable[Any] | None = None,
    example: Inputs = None,
    formats: Sequence[str] | None = None,
    baseline: bool = True,
    seed: int = 0,
) -> Compressed:
    """Compress a network: find its posterior, cut it to a budget, measure the result.

    Args:
        model: a trained network, or a Bayesian one. It is not changed.
        train: training data as a loader of batches with a length.
        val: validation data, likewise; cuts that are searched on data are searched on these.
        budget: how much to cut, or a plan; None for an N:M pattern in every layer that can take it, or for the
            cut of a recipe.
        recipe: one of `bayeslim.recipes`: its method and prior, and its training, cut and fine-tuning where others
            are not given. The network it starts from, trained as usual, is the one to compare with.
        out: the run's folder. A run that was stopped goes on where it was when it is started again; one with another
            budget or other test data keeps the stages that are still valid; one with other training or validation data
            is refused.
            Data are told apart by their content, order included, if they are a `bl.data.Loader`, a DataLoader of a
            TensorDataset, or batches in a list or from a generator (beyond 64 MiB, by evenly spread rows). Other
            loaders are told apart by their size alone. Transformations by a loader are not seen. A second process in
            the same folder is refused.
        method: how to find the posterior of a plain network; `Laplace()` if not given.
        likelihood: what its outputs mean; classes if not given and the targets are whole numbers.
        prior: as for `bayesianize`.
        fit: options of the method's `fit`; {"epochs": 20} trains the network first.
        granularity: "weight", "unit", or N:M such as "2:4".
        criterion: the score to rank by, as for `plan`; "auto" if not given.
        steps: cuts on the way to the budget, 10 if not given (with a recipe, 1); between them the posterior is found
            again. The network by magnitude is cut in as many steps.
        fine_tune: options of training after the cut, such as {"epochs": 3, "lr": 1e-3}; zeros stay zeros.
        test: data to measure on in the end; `val` if not given.
        example: inputs to trace and to time; the first batch of `val` if not given.
        formats: files to export beside the folder of safetensors: "onnx", "pt2", "c". By default ONNX, if it is
            installed, and C, if a compiler is.
        baseline: whether to put a network cut by magnitude beside it.
        seed: of everything random.

    Raises:
        BayeslimError: if a stage fails; the stages before it are kept in `out`.
    """
    chosen = None if formats is None else tuple(formats)
    if recipe is not None:
        refuse_with_recipe(recipe, method, prior, granularity, fit)
        method, prior, fit = recipe.method, recipe.prior, {**recipe.fit, **(fit or {})}
        if budget is None:
            budget, criterion = recipe.budget, recipe.cut.get("criterion") if criterion is None else criterion
        steps = 1 if steps is None else steps
        fine_tune = {**recipe.fine_tune, **(fine_tune or {})} or None
    criterion, steps = "auto" if criterion is None else criterion, 10 if steps is None else steps
    job = Job(budget, granularity, criterion, steps, fit, fine_tune, chosen, baseline, seed, recipe is not None)
    train, val = readable(train, "train"), readable(val, "val")
    test = val if test is None else readable(test, "test")
    bnn = prepared(model, method, likelihood, prior, train, job)
    if example is None:
        example = split_batch(next(iter(val)))[0]
    check(bnn, job, example)
    wanted = {"tuned": fine_tune is not None, MAGNITUDE: baseline}
    stages = [stage for stage in STAGES if wanted.get(stage, True)]
    with run_folder(out, identity(bnn, train, val, job), stages, start_over(seed, train), known=STAGES) as folder:
        return _Run(job, bnn, train, val, test, example, folder).run()


class _Run:
    """The stages of one run, in order."""

    def __init__(
        self, job: Job, start: Bayesian, train: Any, val: Any, test: Any, example: Inputs, folder: RunFolder
    ) -> None:
        self.job, self.start, self.train, self.val, self.test = job, start, train, val, test
        self.example, self.folder = example, folder
        self.architecture = start.plain_copy().eval()
        self.notes: list[str] = []

    def run(self) -> Compressed:
        """Run all stages; those that are complete are read."""
        job, stage = self.job, self.folder.stage
        bnn = stage("fitted", {}, lambda _: self._fit(), save, self._load)
        settings = {
            "example": layout(self.example),
            "budget": words(job.budget),
            "granularity": job.granularity,
            "criterion": words(job.criterion),
            "steps": str(job.steps),
        }
        pruned = stage("pruned", settings, lambda _: self._prune(bnn), save, self._load)
        if job.fine_tune is not None:
            settings["fine_tune"] = words(job.fine_tune)
            pruned = stage("tuned", settings, lambda _: self._tune(pruned, settings), save, self._load)
        slim = stage("slim", settings, lambda _: compact(pruned, self.example), self._save_slim, self._load_slim)
        dense = self.architecture if job.starts_trained else bnn.mean_network()
        networks = {DENSE: dense, **self._baseline(bnn, pruned, settings), SLIM: slim}
        files = ["slim", *self._exported(slim, settings)]
        settings |= {"networks": ", ".join(networks), "test": described(self.test)}
        timed = stage(
            "benchmark.json",
            settings,
            lambda _: self._benchmark(networks),
            records.save_benchmark,
            records.load_benchmark,
        )
        files.append("benchmark.json")
        rows = stage(
            "measured.json",
            settings,
            lambda _: measure_rows(networks, bnn.likelihood, collected(self.test), self.example, latencies(timed)),
            records.save_rows,
            records.load_rows,
        )
        self.notes += untrained(rows, self.test) + too_much(rows) + not_faster(timed)
        last = "tuned" if job.fine_tune is not None else "pruned"
        if importlib.util.find_spec("jinja2") is None:
            self.notes.append("No report: jinja2 is not installed. Run: pip install 'bayeslim[report]'")
        else:
            stage(
                "report.html",
                settings,
                lambda path: report(
                    bnn,
                    pruned,
                    slim,
                    path,
                    validate=self.test,
                    example=self.example,
                    rows=rows,
                    benchmark=timed,
                    files=[*files, last],
                ),
                records.is_written,
                Path,
            )
            files.append("report.html")
        paths = tuple(self.folder.path / name for name in files)
        return Compressed(slim, pruned, bnn, pruned.plan_, rows, timed, paths, self.folder.path, tuple(self.notes))

    def _fit(self) -> Bayesian:
        bnn = copy.deepcopy(self.start)
        if self.job.fit is None:
            try:
                assert bnn.posterior_
            except NotFitted:
                pass
            else:
                return bnn
        bnn.fit(self.train, **self._training(self.job.fit or {}, "fitted", {}))
        return bnn.eval()

    def _prune(self, bnn: Bayesian) -> Bayesian:
        job = self.job
        if not isinstance(job.budget, Budget):
            chosen = job.budget or plan(bnn, granularity=job.granularity, criterion=job.criterion)
            return prune(bnn, chosen)
        return prune(
            bnn,
            job.budget,
            refresh=self.train if job.steps > 1 else None,
            steps=job.steps,
            validate=self.val,
            example=self.example,
            granularity=job.granularity,
            criterion=job.criterion,
        )

    def _tune(self, pruned: Bayesian, settings: Mapping[str, str]) -> Bayesian:
        options = self._training(self.job.fine_tune or {}, "tuned", settings)
        return fine_tuned(pruned, self.train, **options).eval()

    def _training(self, options: Mapping[str, Any], stage: str, settings: Mapping[str, str]) -> dict[str, Any]:
        """Add a seed to the options of `fit`, and a checkpoint where it trains."""
        chosen = {"seed": self.job.seed, **options}
        if "epochs" in chosen and chosen.get("tune") != "online":
            chosen.setdefault("checkpoint", self.folder.checkpoint(stage, settings))
        return chosen

    def _plain_training(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Select the options of fine-tuning that apply to a plain network.

        A checkpoint is left out, since it belongs to the other network.
        """
        own = {"seed": self.job.seed, **options}
        return {name: own[name] for name in options_of(training) if name in own and name != "checkpoint"}

    def _baseline(self, bnn: Bayesian, pruned: Bayesian, settings: Mapping[str, str]) -> dict[str, nn.Module]:
        job = self.job
        if not job.baseline:
            return {}

        def make(_: Path) -> nn.Module:
            tune = None if job.fine_tune is None else self._plain_training(job.fine_tune)
            return by_magnitude(bnn, pruned, job.budget, job.granularity, job.steps, self.example, self.train, tune)

        try:
            return {MAGNITUDE: self.folder.stage(MAGNITUDE, settings, make, self._save_slim, self._load_slim)}
        except NoBaseline as error:
            self.notes.append(f"No network by magnitude beside it: {error}")
            return {}

    def _exported(self, slim: nn.Module, settings: Mapping[str, str]) -> list[str]:
        by_choice = self.job.formats is not None
        usual = ("onnx",) * has_onnx() + ("c",) * (find_compiler() is not None)
        formats = usual if self.job.formats is None else self.job.formats

        def make(_: Path) -> records.ExportedFiles:
            files, notes = {}, []
            for suffix in SUFFIXES:  # those of an earlier network
                (self.folder.path / f"slim.{suffix}").unlink(missing_ok=True)
            for name in formats:
                file = self.folder.path / f"slim.{name}"
                try:
                    export(slim, file, example=self.example)
                    files[file.name] = records.checksum(file)
                except BayeslimError as error:
                    if by_choice:
                        raise
                    notes.append(f"No slim.{name}: {error}")
            return records.ExportedFiles(files, tuple(notes))

        known = {**settings, "formats": ", ".join(formats)}

        def load_checked(place: Path) -> records.ExportedFiles:
            found = records.load_exported(place)
            for name, expected in found.files.items():
                file = self.folder.path / name
                if not file.is_file() or records.checksum(file) != expected:
                    raise ResultIncomplete(f"{file} is missing or was changed.")
            return found

        found = self.folder.stage("exported.json", known, make, records.save_exported, load_checked)
        self.notes += found.notes
        return list(found.files)

    def _benchmark(self, networks: Mapping[str, nn.Module]) -> Benchmark:
        others = {name: network for name, network in networks.items() if name not in (DENSE, SLIM)}
        return benchmark(networks[DENSE], networks[SLIM], example=self.example, others=others)

    def _load(self, path: Path) -> Bayesian:
        return cast("Bayesian", load(path, self.architecture))

    def _save_slim(self, network: nn.Module, path: Path) -> None:
        records.save_slim(network, path, self.example)

    def _load_slim(self, path: Path) -> nn.Module:
        return records.load_slim(path, self.architecture)
