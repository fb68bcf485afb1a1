"""The flags that several commands share, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bayeslim.app import zoo
from bayeslim.app.cli.sources import FITTED, SPARSE
from bayeslim.io.registry import all_registered

Config = Annotated[Path | None, typer.Option(help="A TOML file with any of these settings; flags win.")]
Model = Annotated[
    str | None,
    typer.Option(help=f'{", ".join(zoo.names())}, with arguments "mlp(hidden=100)", or "package.module:factory".'),
]
Data = Annotated[
    str | None,
    typer.Option(
        help='A name that `bayeslim data` lists, a table FILE.csv (not for compress), or "package.module:loaders", '
        "giving (train, val[, test])."
    ),
]
Target = Annotated[str | None, typer.Option(help="The column to predict, for --data FILE.csv: numbers, or classes.")]
MissingCells = Annotated[
    str | None,
    typer.Option(
        "--missing", show_default="refuse", help='Cells of a table without a value: "refuse", or "impute" them.'
    ),
]
Drop = Annotated[list[str] | None, typer.Option(help="A column of a table to leave out; repeatable.")]
Out = Annotated[str | None, typer.Option(help="The run's folder; a run that was stopped goes on from it.")]
FitOut = Annotated[
    str | None,
    typer.Option("--out", show_default="fit", help="The run's folder; a run that was stopped goes on from it."),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Trained weights: a safetensors file, a state dict in a .pt file, or a folder from bl.save."),
]
MethodName = Annotated[
    str | None, typer.Option("--method", help='"laplace" or "variational", with arguments if need be.')
]
FitMethod = Annotated[
    str | None,
    typer.Option(
        "--method",
        show_default="variational",
        help=f'{", ".join(FITTED)}, with arguments "variational(samples=2, kl_schedule=warmup(end=5))".',
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help=f'Train to be sparse instead of cutting to a goal: {", ".join(SPARSE)}, or "bottleneck(strength=0.2)".',
    ),
]
PriorName = Annotated[
    str | None,
    typer.Option(
        "--prior",
        show_default="normal(1.0)",
        help=f'{", ".join(all_registered("prior"))}, with arguments "normal(0.2)".',
    ),
]
LikelihoodName = Annotated[
    str | None,
    typer.Option(
        "--likelihood",
        show_default="by the targets",
        help=f'{", ".join(all_registered("likelihood"))}, with arguments "gaussian(noise=0.1)".',
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Train this long first; otherwise the weights are taken as they are.")]
FitLr = Annotated[float | None, typer.Option("--lr", show_default="the method's own", help="The learning rate.")]
Lr = Annotated[
    float | None, typer.Option(show_default="0.001, or a recipe's own", help="The learning rate of all training.")
]
Sparsity = Annotated[float | None, typer.Option(help="Goal: the fraction of weights that goes.")]
Parameters = Annotated[int | None, typer.Option(help="Goal: parameters left, at most.")]
Flops = Annotated[float | None, typer.Option(help="Goal: arithmetic of a call, at most.")]
Bytes = Annotated[float | None, typer.Option(help="Goal: bytes on disk, at most.")]
Threshold = Annotated[float | None, typer.Option(help="Goal: cut all weights that score lower; needs a criterion.")]
Latency = Annotated[float | None, typer.Option(help="Goal: seconds a call, at most (units only).")]
MaxErrorIncrease = Annotated[
    float | None, typer.Option(help="Goal: the most that costs so many points of validation error.")
]
EvidenceGoal = Annotated[
    bool | None, typer.Option("--evidence", help="Goal: the most that does not lower the evidence.")
]
Scope = Annotated[str | None, typer.Option(help='Rank all weights together ("global") or in each "layer".')]
Protect = Annotated[list[str] | None, typer.Option(help="A parameter, module or pattern to leave alone; repeatable.")]
KeepBest = Annotated[
    bool | None, typer.Option("--keep-best/--refuse-empty", help="Leave an emptied layer its best weight, or refuse.")
]
Granularity = Annotated[str | None, typer.Option(help='"weight", "unit", or N:M such as "2:4".')]
CriterionName = Annotated[str | None, typer.Option("--criterion", help='"auto", "snr", "curvature", "magnitude", ...')]
Steps = Annotated[int | None, typer.Option(help="Cuts on the way, the posterior found again after each.")]
FineTune = Annotated[int | None, typer.Option(help="Epochs of fine-tuning after the cut.")]
Formats = Annotated[list[str] | None, typer.Option("--format", help='"onnx" or "pt2"; repeatable.')]
Baseline = Annotated[bool | None, typer.Option(help="Whether to cut a copy by magnitude, to compare.")]
BatchSize = Annotated[int | None, typer.Option(show_default="128", help="Of training, for data sets by name.")]
Validation = Annotated[
    float | None, typer.Option(show_default="0.1", help="The fraction held out for validation, for data sets by name.")
]
Seed = Annotated[int | None, typer.Option(show_default="0", help="The seed of everything random.")]
LrSchedule = Annotated[
    str | None,
    typer.Option(show_default="constant", help='"constant", or decay to 0: "linear", "cosine", "half-then-linear".'),
]
Patience = Annotated[int | None, typer.Option(help="Stop after so many epochs without a better validation NLL.")]
Tune = Annotated[
    str | None, typer.Option(help='How laplace chooses its prior: "evidence", "online", "grid", "cross-validation".')
]
Device = Annotated[
    str | None, typer.Option(show_default="auto", help='"cpu", "cuda", or "auto" for a GPU if there is one.')
]
Fitted = Annotated[Path, typer.Argument(help="A folder from `bayeslim fit`, or from bl.save.")]
HeldOut = Annotated[
    str | None,
    typer.Option(
        show_default="the data of the fit",
        help='A name that `bayeslim data` lists, a table FILE.csv, or "package.module:loaders"; its test part.',
    ),
]
OwnModel = Annotated[str | None, typer.Option(help='"package.module:factory", for a network that is not in the zoo.')]
OwnData = Annotated[str | None, typer.Option(help='"package.module:loaders", for data that are not in the list.')]
Samples = Annotated[int, typer.Option(min=1, help="Networks drawn from the posterior and averaged.")]
How = Annotated[str, typer.Option(help='"auto", "sample", "mean", or another way of the method.')]
DrawSeed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The seed of the draws.")]
