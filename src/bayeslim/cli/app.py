"""The commands, and how errors reach a person."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import bayeslim
from bayeslim.errors import BayeslimError


class _App(typer.Typer):
    """A command line whose deliberate errors are messages, not tracebacks."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return super().__call__(*args, **kwargs)
        except BayeslimError as error:
            Console(stderr=True).print(f"[bold red]Error:[/] {error}", highlight=False)
            sys.exit(1)


app = _App(name="bayeslim", help="Bayesian neural networks that slim down.", no_args_is_help=True, add_completion=False)


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
    output: Annotated[Path, typer.Option(help="The folder for the picture and the trained network.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="The seed of everything random.")] = 0,
) -> None:
    """Train a Bayesian network on handwritten digits and show what it is sure of, in under a minute."""
    from bayeslim.cli.demo import run

    run(output, seed)
