"""The commands, and how errors reach a person."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import bayeslim
from bayeslim.app.cli import demo as demonstration
from bayeslim.app.cli import options as o
from bayeslim.app.cli.config import Settings
from bayeslim.app.cli.datasets import fetch, listed
from bayeslim.app.cli.evaluating import evaluate_folder, quality
from bayeslim.app.cli.fitting import FitSettings
from bayeslim.app.cli.parts import export_folder, prune_folder, report_run
from bayeslim.app.cli.pictures import draw_pictures
from bayeslim.app.cli.predicting import predict_folder
from bayeslim.app.cli.tables import against_table, data_table, network_table, quality_table
from bayeslim.app.report.scores import collected
from bayeslim.gallery import PICTURES

_PACKAGE = Path(bayeslim.__file__).parent
_EXIT_CODE_INTERRUPTED = 130


class _App(typer.Typer):
    """A command line whose deliberate errors and warnings are messages, without places in the code."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        standard = warnings.formatwarning
        warnings.formatwarning = _warning_line
        try:
            return super().__call__(*args, **kwargs)
        except (bayeslim.errors.BayeslimError, ValueError, TypeError, OSError) as error:
            if not _is_deliberate(error):
                raise
            words = escape(_printable(str(error)))  # brackets in it are no markup
            Console(stderr=True).print("[bold red]Error:[/]", words, highlight=False, soft_wrap=True)
            sys.exit(1)
        finally:
            warnings.formatwarning = standard


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning for a person: one line, without the place in the code."""
    return f"Warning: {_printable(' '.join(str(message).split()))}\n"


def _printable(text: str) -> str:
    """Replace control characters of a terminal: an error may quote a foreign file."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_deliberate(error: BaseException) -> bool:
    """Check whether the library raised an error itself, not code that it called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised_here = Path(last.filename).is_relative_to(_PACKAGE) and (last.line or "").startswith("raise ")
    return isinstance(error, bayeslim.errors.BayeslimError) or raised_here


@contextmanager
def _resumable(folder: Path | str) -> Iterator[None]:
    """Say how to go on when the command is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"Stopped. Finished stages are kept: the same command goes on from {folder}.")
        sys.exit(_EXIT_CODE_INTERRUPTED)


app = _App(
    name="bayeslim",
    help="Bayesian neural networks that slim down.",
    epilog='Start with: bayeslim demo, or bayeslim fit --model "mlp(inputs=64)" --data digits --epochs 10. '
    "BAYESLIM_PROGRESS=0 in the environment turns progress bars off.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(bayeslim.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Make PyTorch networks Bayesian, read their uncertainty, prune by the posterior."""


@app.command(name="help")
def show_help(
    context: typer.Context,
    command: Annotated[str | None, typer.Argument(help="A command.")] = None,
) -> None:
    """Show the help of a command, or the list of commands."""
    assert context.parent is not None
    words = ["--help"] if command is None else [command, "--help"]
    context.parent.command.main(words, prog_name=context.parent.info_name)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The run's folder; its finished stages are not run again.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="The seed of everything random.")] = 0,
    recipe: o.RecipeName = None,
    device: o.Device = None,
) -> None:
    """Compress a network on handwritten digits: train, prune, compact, export, report."""
    demonstration.run(out, seed, recipe, device or "auto")


@app.command()
def data(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets to download, or to check if they are here.")
    ] = None,
) -> None:
    """List the data sets and where they are; with names, download them.

    Files are looked for in $BAYESLIM_DATA and in the cache (~/.cache/bayeslim).
    """
    if not names:
        Console().print(data_table(listed()))
        typer.echo("bayeslim data NAME downloads an image set, and says where the file of a regression set goes.")
    for line in fetch(names or []):
        typer.echo(line)


@app.command()
def fit(
    config: o.Config = None, model: o.Model = None, data: o.Data = None, out: o.FitOut = None,
    weights: o.Weights = None, method: o.FitMethod = None, prior: o.PriorName = None,
    likelihood: o.LikelihoodName = None, epochs: o.Epochs = None, lr: o.FitLr = None, lr_schedule: o.LrSchedule = None,
    patience: o.Patience = None, tune: o.Tune = None, batch_size: o.BatchSize = None,
    validation: o.Validation = None, seed: o.Seed = None, device: o.Device = None, target: o.Target = None,
    missing: o.MissingCells = None, drop: o.Drop = None,
) -> None:  # fmt: skip
    """Find the posterior of a network, by training it or around trained weights.

    Methods such as laplace also take a network that is already trained (--weights). For a table nothing but its file
    and the column to predict is needed: bayeslim fit --data houses.csv --target price.
    """
    flags = dict(locals())
    settings = FitSettings.read(flags.pop("config"), flags)
    with _resumable(settings.out):
        fitted = settings.run()
    batches = collected(fitted.val)
    rows, prediction = quality(fitted.bnn, batches, fitted.target_scale)
    typer.echo(f"Validation: {len(prediction):,} held-out examples of {settings.data}")
    Console().print(quality_table(rows))
    typer.echo(f"The network is in {fitted.out}. On test data, if there are any: {settings.next_command}")


@app.command()
def predict(
    network: o.Fitted,
    table: Annotated[
        Path | None, typer.Argument(help="A table of new rows, for a network that was fitted to one: NAME.csv.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            show_default="TABLE-predictions.csv; without TABLE, standard output",
            help="The file: NAME.csv, a table, or NAME.npz, arrays for numpy.",
        ),
    ] = None,
    interval: Annotated[
        float | None, typer.Option(help="Write the interval that holds a value with this probability, such as 0.9.")
    ] = None,
    data: o.HeldOut = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Examples in a .npy file instead of the test part: features in the data's units, images in [0, 1]."
        ),
    ] = None,
    model: o.OwnModel = None,
    samples: o.Samples = 32,
    how: o.How = "auto",
    seed: o.DrawSeed = 0,
    device: o.Device = None,
) -> None:
    """Write the predictions of a fitted network, with their uncertainty.

    Uncertainties of classes are entropies in nats, those of values standard deviations. Aleatoric uncertainty is noise
    that stays; epistemic uncertainty falls with more data.
    """
    if to is None and table is not None:
        to = Path(f"{table.stem}-predictions.csv")
    done = predict_folder(network, table, to, model, data, inputs, interval, samples, how, seed, device or "auto")
    typer.echo(done, err=to is None)


@app.command()
def evaluate(
    network: o.Fitted,
    data: o.HeldOut = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Other data that its uncertainty should tell apart; repeatable.")
    ] = None,
    model: o.OwnModel = None,
    samples: o.Samples = 32,
    how: o.How = "auto",
    seed: o.DrawSeed = 0,
    device: o.Device = None,
    json: Annotated[Path | None, typer.Option(help="A file for the numbers.")] = None,
) -> None:
    """Measure a fitted network on test data: error, NLL, Brier score and calibration."""
    found = evaluate_folder(network, model, data, against or [], samples, how, seed, device or "auto", json)
    typer.echo(f"{found.data}, {found.part} part: {found.examples:,} examples")
    Console().print(quality_table(found.rows))
    if found.against:
        typer.echo("Other data told apart by uncertainty (AUROC: 1 always, 0.5 by chance)")
        Console().print(against_table(found.against))


@app.command()
def compress(
    config: o.Config = None, model: o.Model = None, data: o.Data = None, out: o.Out = None, weights: o.Weights = None,
    method: o.MethodName = None, recipe: o.RecipeName = None, prior: o.PriorName = None,
    likelihood: o.LikelihoodName = None, epochs: o.Epochs = None, lr: o.Lr = None, sparsity: o.Sparsity = None,
    parameters: o.Parameters = None, flops: o.Flops = None, bytes: o.Bytes = None, threshold: o.Threshold = None,
    latency: o.Latency = None, max_error_increase: o.MaxErrorIncrease = None, evidence: o.EvidenceGoal = None,
    scope: o.Scope = None, protect: o.Protect = None, keep_best: o.KeepBest = None, granularity: o.Granularity = None,
    criterion: o.CriterionName = None, steps: o.Steps = None, fine_tune: o.FineTune = None, formats: o.Formats = None,
    baseline: o.Baseline = None, batch_size: o.BatchSize = None, validation: o.Validation = None, seed: o.Seed = None,
    device: o.Device = None,
) -> None:  # fmt: skip
    """Turn a network and data into a smaller network, files to deploy, and a report."""
    flags = dict(locals())
    settings = Settings.read(flags.pop("config"), flags)
    with _resumable(settings.out):
        result = settings.run()
    settings.keep()
    console = Console()
    console.print(network_table(result.rows, "Held-out data"))
    for line in (*map(str, result.files), *result.notes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command()
def prune(
    network: Annotated[Path, typer.Argument(help="A folder with a fitted Bayesian network, from bl.save.")],
    out: Annotated[Path, typer.Option(help="The folder for the pruned network and its plan.")],
    model: o.Model = None, data: o.Data = None, sparsity: o.Sparsity = None, parameters: o.Parameters = None,
    flops: o.Flops = None, bytes: o.Bytes = None, threshold: o.Threshold = None, latency: o.Latency = None,
    max_error_increase: o.MaxErrorIncrease = None, evidence: o.EvidenceGoal = None, scope: o.Scope = None,
    protect: o.Protect = None, keep_best: o.KeepBest = None, granularity: o.Granularity = None,
    criterion: o.CriterionName = None, steps: o.Steps = None, batch_size: o.BatchSize = None,
    validation: o.Validation = None, seed: o.Seed = None, device: o.Device = None,
) -> None:  # fmt: skip
    """Cut a fitted Bayesian network to a budget; with data, in steps."""
    flags = dict(locals()) | {"device": device or "auto"}
    typer.echo(prune_folder(**flags))


@app.command()
def export(
    network: Annotated[Path, typer.Argument(help="A folder with a network, from bl.save.")],
    to: Annotated[Path, typer.Option(help="The file: NAME.onnx or NAME.pt2.")],
    model: o.Model = None,
    data: o.Data = None,
    shape: Annotated[
        str | None, typer.Option(help='The shape of one input, such as "1x28x28", instead of data.')
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Draws of a Bayesian network; without, its mean.")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Store ONNX weights sparsely.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Store ONNX weights in 8 bits.")] = False,
    device: o.Device = None,
) -> None:
    """Write a network as an ONNX file or a PyTorch program."""
    typer.echo(export_folder(network, to, model, data, shape, samples, sparse, int8, device or "auto"))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run of `bayeslim compress`.")],
    to: Annotated[Path | None, typer.Option(help="The file; by default report.html in the run's folder.")] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
    model: o.OwnModel = None,
    data: o.OwnData = None,
    device: o.Device = None,
) -> None:
    """Write the report of a finished run again.

    Code that the run's folder names is not run: name a network or data of your own with --model and --data.
    """
    typer.echo(report_run(run, to, title, model, data, device or "auto"))


@app.command()
def gallery(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Pictures, all if none is named: {', '.join(PICTURES)}.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the pictures.")] = Path("gallery"),
    theme: Annotated[str, typer.Option(help='"light", "dark", or "both".')] = "light",
) -> None:
    """Draw the ideas behind the library as pictures.

    Each is computed by a short file of bayeslim.gallery. Pictures are SVG files, and one animation is a GIF. All of
    them take about a minute and a half.
    """
    for file in draw_pictures(names or list(PICTURES), out, theme):
        typer.echo(file)
