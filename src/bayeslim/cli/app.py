"""The commands, and how errors reach a person."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import bayeslim

_PACKAGE = Path(bayeslim.__file__).parent
_STOPPED = 130


class _App(typer.Typer):
    """A command line whose deliberate errors are messages, not tracebacks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except (bayeslim.errors.BayeslimError, ValueError, TypeError, OSError) as error:
            if not _is_deliberate(error):
                raise
            Console(stderr=True).print("[bold red]Error:[/]", str(error), highlight=False, markup=True, soft_wrap=True)
            sys.exit(1)


def _is_deliberate(error: BaseException) -> bool:
    """Whether the library itself raised an error on purpose, rather than something it called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised_here = Path(last.filename).is_relative_to(_PACKAGE) and (last.line or "").startswith("raise ")
    return isinstance(error, bayeslim.errors.BayeslimError) or raised_here


app = _App(
    name="bayeslim",
    help="Bayesian neural networks that slim down.",
    no_args_is_help=True,
    add_completion=False,
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
    """Make any PyTorch network Bayesian, read its uncertainty, prune it by its posterior."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="The run's folder; what is in it is not made again.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="The seed of everything random.")] = 0,
) -> None:
    """Compress a network on handwritten digits: train, prune by its posterior, compact, export, report."""
    from bayeslim.cli.demo import run

    run(output, seed)


Config = Annotated[Path | None, typer.Option(help="A TOML file with any of these settings; flags win.")]
Model = Annotated[str | None, typer.Option(help='"lenet5", "mlp(hidden=100)", or "package.module:factory".')]
Data = Annotated[
    str | None, typer.Option(help='"mnist", ..., or "package.module:loaders", giving (train, val[, test]).')
]
Out = Annotated[str | None, typer.Option(help="The run's folder; a run that was stopped goes on from it.")]
Weights = Annotated[str | None, typer.Option(help="Trained weights: a safetensors file, or a folder from bl.save.")]
MethodName = Annotated[
    str | None, typer.Option("--method", help='"laplace" or "variational", with arguments if need be.')
]
PriorName = Annotated[str | None, typer.Option("--prior", help='"normal(0.2)".')]
LikelihoodName = Annotated[str | None, typer.Option("--likelihood", help='"categorical", "gaussian(noise=0.1)", ...')]
Epochs = Annotated[int | None, typer.Option(help="Train this long first; otherwise the weights are taken as they are.")]
Lr = Annotated[float | None, typer.Option(help="The learning rate of all training.")]
Sparsity = Annotated[float | None, typer.Option(help="Goal: the fraction of weights that goes.")]
Parameters = Annotated[int | None, typer.Option(help="Goal: parameters left, at most.")]
Flops = Annotated[float | None, typer.Option(help="Goal: arithmetic of a call, at most.")]
Bytes = Annotated[float | None, typer.Option(help="Goal: bytes on disk, at most.")]
Threshold = Annotated[float | None, typer.Option(help="Goal: cut what scores lower; needs a criterion.")]
Latency = Annotated[float | None, typer.Option(help="Goal: seconds a call, at most (units only).")]
MaxErrorIncrease = Annotated[
    float | None, typer.Option(help="Goal: the most that costs so many points of validation error.")
]
EvidenceGoal = Annotated[
    bool | None, typer.Option("--evidence", help="Goal: the most that does not lower the evidence.")
]
Scope = Annotated[str | None, typer.Option(help='Rank all weights together ("global") or in each "layer".')]
Protect = Annotated[list[str] | None, typer.Option(help="A parameter, module or pattern to leave alone; repeatable.")]
KeepBest = Annotated[bool | None, typer.Option("--keep-best", help="Leave a layer its best rather than refuse.")]
Granularity = Annotated[str | None, typer.Option(help='"weight", "unit", or N:M such as "2:4".')]
CriterionName = Annotated[str | None, typer.Option("--criterion", help='"auto", "snr", "curvature", "magnitude", ...')]
Steps = Annotated[int | None, typer.Option(help="Cuts on the way, the posterior found again after each.")]
FineTune = Annotated[int | None, typer.Option(help="Epochs of fine-tuning after the cut.")]
Formats = Annotated[list[str] | None, typer.Option("--format", help='"onnx" or "pt2"; repeatable.')]
Baseline = Annotated[bool | None, typer.Option(help="Whether to cut a copy by magnitude, to compare.")]
BatchSize = Annotated[int | None, typer.Option(help="Of training, for data sets by name.")]
Validation = Annotated[float | None, typer.Option(help="The fraction held out for validation, for data sets by name.")]
Seed = Annotated[int | None, typer.Option(help="The seed of everything random.")]


@app.command()
def compress(
    config: Config = None, model: Model = None, data: Data = None, out: Out = None, weights: Weights = None,
    method: MethodName = None, prior: PriorName = None, likelihood: LikelihoodName = None, epochs: Epochs = None,
    lr: Lr = None, sparsity: Sparsity = None, parameters: Parameters = None, flops: Flops = None, bytes: Bytes = None,
    threshold: Threshold = None, latency: Latency = None, max_error_increase: MaxErrorIncrease = None,
    evidence: EvidenceGoal = None, scope: Scope = None, protect: Protect = None, keep_best: KeepBest = None,
    granularity: Granularity = None, criterion: CriterionName = None, steps: Steps = None, fine_tune: FineTune = None,
    formats: Formats = None, baseline: Baseline = None, batch_size: BatchSize = None, validation: Validation = None,
    seed: Seed = None,
) -> None:  # fmt: skip
    """From a network and data to a smaller network, files to deploy, and a report."""
    flags = dict(locals())
    from bayeslim.cli.config import Settings
    from bayeslim.cli.tables import network_table

    settings = Settings.read(flags.pop("config"), flags)
    try:
        result = settings.run()
    except KeyboardInterrupt:
        Console(stderr=True).print(f"Stopped. What is done is kept: the same command goes on from {settings.out}.")
        sys.exit(_STOPPED)
    settings.keep()
    console = Console()
    console.print(network_table(result.rows, "Held-out data"))
    for line in (*map(str, result.files), *result.notes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command()
def prune(
    network: Annotated[Path, typer.Argument(help="A folder with a fitted Bayesian network, from bl.save.")],
    out: Annotated[Path, typer.Option(help="The folder for the pruned network and its plan.")],
    model: Model = None, data: Data = None, sparsity: Sparsity = None, parameters: Parameters = None,
    flops: Flops = None, bytes: Bytes = None, threshold: Threshold = None, latency: Latency = None,
    max_error_increase: MaxErrorIncrease = None, evidence: EvidenceGoal = None, scope: Scope = None,
    protect: Protect = None, keep_best: KeepBest = None, granularity: Granularity = None,
    criterion: CriterionName = None, steps: Steps = None, batch_size: BatchSize = None, validation: Validation = None,
    seed: Seed = None,
) -> None:  # fmt: skip
    """Cut a fitted Bayesian network to a budget; with data, in steps."""
    flags = dict(locals())
    from bayeslim.cli.parts import prune_folder

    typer.echo(prune_folder(**flags))


@app.command()
def export(
    network: Annotated[Path, typer.Argument(help="A folder with a network, from bl.save.")],
    to: Annotated[Path, typer.Option(help="The file: NAME.onnx or NAME.pt2.")],
    model: Model = None,
    data: Data = None,
    shape: Annotated[
        str | None, typer.Option(help='The shape of one input, such as "1x28x28", instead of data.')
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Draws of a Bayesian network; without, its mean.")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Store ONNX weights sparsely.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Store ONNX weights in 8 bits.")] = False,
) -> None:
    """Write a network as an ONNX file or a PyTorch program."""
    from bayeslim.cli.parts import export_folder

    typer.echo(export_folder(network, to, model, data, shape, samples, sparse, int8))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run of `bayeslim compress`.")],
    to: Annotated[Path | None, typer.Option(help="The file; by default report.html in the run's folder.")] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
) -> None:
    """Write the report of a finished run again."""
    from bayeslim.cli.parts import report_run

    typer.echo(report_run(run, to, title))
