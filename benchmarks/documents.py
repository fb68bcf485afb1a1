"""The generated tables of README.md, docs/results.md and benchmarks/README.md.

    python benchmarks/documents.py --write      bring them up to date with benchmarks/results/
    python benchmarks/documents.py --check      say which are not, and fail

A document marks where a table stands, and the names are those of `BLOCKS`:

    <!-- begin language models -->
    <!-- end language models -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

from writers import (  # noqa: E402
    grid,
    language_models,
    overview,
    posteriors,
    pruning,
    sparse,
    suite,
    training,
    uncertainty,
)

DOCUMENTS = ("README.md", "docs/results.md", "benchmarks/README.md")

Content = Mapping[str, Any]
Writer = Callable[..., str]

BLOCKS: dict[str, tuple[Writer, tuple[str, ...]]] = {
    "pruning without retraining": (pruning.one_shot, ("one_shot_pruning",)),
    "prior widths": (pruning.prior_widths, ("prior_widths",)),
    "residual pruning": (pruning.residual, ("residual_pruning",)),
    "residual pruning at half size": (pruning.residual, ("residual_pruning_half",)),
    "recurrent pruning": (pruning.recurrent, ("recurrent_pruning",)),
    "voice encoder": (pruning.voice_encoder, ("voice_encoder",)),
    "voice encoder, times": (pruning.voice_encoder_times, ("voice_encoder",)),
    "language models": (language_models.markdown, ("language_models",)),
    "language models in short": (language_models.summary, ("language_models",)),
    "training to be sparse": (sparse.short, ("sparse_posteriors", "entropy_coded")),
    "sparse posteriors against goals": (sparse.against_goals, ("sparse_posteriors", "entropy_coded")),
    "prices of units": (sparse.prices, ("sparse_posteriors",)),
    "unseen test images": (sparse.unseen, ("sparse_posteriors", "entropy_coded")),
    "fresh test images": (sparse.fresh, ("sparse_posteriors", "entropy_coded")),
    "recipes that cut": (sparse.recipes, ("recipes",)),
    "recipes that cut nothing": (sparse.dropouts, ("recipes",)),
    "grid of Bayes by Backprop": (grid.markdown, ("bayes_by_backprop_grid",)),
    "training steps on a GPU": (training.steps, ("training_steps",)),
    "whole fits on a GPU": (training.fits, ("training_fits", "training_fits_alone")),
    "choices of Bayes by Backprop": (posteriors.report_studies, ("report_studies",)),
    "links of Laplace": (posteriors.laplace_links, ("laplace_links",)),
    "standard deviations": (posteriors.widths, ("posterior_widths",)),
    "stationary standard deviations": (posteriors.stationary_widths, ("posterior_widths_stationary",)),
    "chain temperatures": (posteriors.chain_temperatures, ("chain_temperatures",)),
    "Rényi divergences": (posteriors.uci_renyi, ("uci_renyi",)),
    "many models": (posteriors.many_models, ("many_models",)),
    "many regressions": (posteriors.many_regressions, ("many_models",)),
    "predictions from S networks": (posteriors.particle_passes, ("particle_passes",)),
    "out of distribution": (posteriors.out_of_distribution, ("out_of_distribution",)),
    "pruning by signal to noise": (posteriors.variational_pruning, ("variational_pruning",)),
    "continual learning": (posteriors.continual, ("continual",)),
    "UCI": (uncertainty.uci, ("uci",)),
    "five LeNets for one": (uncertainty.five_for_one, ("five_for_one_lenet5",)),
    "five VGGs for one": (uncertainty.five_for_one, ("five_for_one_vgg",)),
    "variance networks": (uncertainty.variances, ("paper_methods",)),
    "units cut by the evidence": (uncertainty.reductions, ("paper_methods",)),
    "learned prior precisions": (uncertainty.relevances, ("paper_methods",)),
    "active learning": (uncertainty.active_learning, ("active_learning",)),
    "adversarial inputs": (uncertainty.adversarial, ("adversarial",)),
    "suite_cpu": (partial(suite.markdown, name="suite_cpu"), ("suite_cpu",)),
    "suite_cuda": (partial(suite.markdown, name="suite_cuda"), ("suite_cuda",)),
}
"""The writer of every block, and the names of the result files that it takes."""

GATHERED: dict[str, Callable[[Mapping[str, Content]], str]] = {
    "strongest results": overview.strongest,
    "other measurements": overview.others,
}
"""Blocks that take one line from each of many results."""


@cache
def results() -> dict[str, Content]:
    """Read all result files."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def block(name: str) -> str:
    """Write the table of a block."""
    if name in GATHERED:
        return GATHERED[name](results())
    writer, names = BLOCKS[name]
    if not set(names) <= set(results()):
        return "*Not measured yet.*\n"
    return writer(*(results()[one] for one in names)).strip("\n") + "\n"


def updated(document: str) -> str:
    """Replace all generated blocks of a document."""

    def replaced(mark: re.Match[str]) -> str:
        name = mark["name"]
        if name not in BLOCKS and name not in GATHERED:
            raise ValueError(f'No table is called "{name}". The names are {", ".join([*BLOCKS, *GATHERED])}.')
        return f"<!-- begin {name} -->\n\n{block(name)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin (?P<name>.+?) -->\n.*?<!-- end (?P=name) -->", replaced, document, flags=re.DOTALL)


def main() -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = []
    for path in (ROOT / name for name in DOCUMENTS):
        before = path.read_text(encoding="utf-8")
        after = updated(before)
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if options.write:
                path.write_text(after, encoding="utf-8")
    if options.check and stale:
        sys.exit(f"Not up to date: {', '.join(stale)}. Run: python benchmarks/documents.py --write")
    print(f"Written: {', '.join(stale) or 'nothing'}" if options.write else "All tables are up to date.")


if __name__ == "__main__":
    main()
