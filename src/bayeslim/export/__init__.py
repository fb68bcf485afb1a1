"""`export`: it writes a network, or draws of a posterior, as one file."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayeslim.bayesian import Bayesian
from bayeslim.compact.example import batches, run_example
from bayeslim.compact.quiet import one_thread_at_a_time
from bayeslim.compact.trace import evaluating_copy
from bayeslim.errors import BayeslimError, check_number
from bayeslim.export.c.write import to_c
from bayeslim.export.check import ExportFailed
from bayeslim.export.ensemble import OUTPUTS, Ensemble, ensemble
from bayeslim.export.integer_onnx import to_integer_onnx
from bayeslim.export.onnx import to_onnx
from bayeslim.export.program import to_program
from bayeslim.io.files import write_file
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.shared.point_network import PointNetwork
from bayeslim.posteriors import Particles
from bayeslim.quantise.result import Quantised
from bayeslim.types import Inputs, to_device

__all__ = ["Ensemble", "ExportFailed", "Exported", "ensemble", "export"]


@dataclass(frozen=True, repr=False)
class Exported:
    """The record of an exported file.

    Attributes:
        path: the file.
        format: "onnx", "pt2" or "c".
        bytes: its size.
        difference: the largest difference between its outputs and the network's, relative to the largest output; NaN
            for a C file that was not checked, for want of a compiler.
        batch_is_free: whether the file takes batches of any size.
    """

    path: Path
    format: str
    bytes: int
    difference: float
    batch_is_free: bool

    def __repr__(self) -> str:
        batch = "any batch size" if self.batch_is_free else "the example's batch size only"
        return (
            f"Exported {self.path} ({self.format}, {self.bytes / 1024:,.4g} KiB, {batch}): "
            f"largest relative difference {self.difference:.2g}"
        )


@one_thread_at_a_time
def export(
    network: Bayesian | nn.Module | Quantised | Sequence[nn.Module],
    path: str | os.PathLike[str],
    *,
    example: Inputs,
    likelihood: Likelihood | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    sparse: bool = False,
    int8: bool = False,
    tolerance: float = 1e-5,
) -> Exported:
    """Write a network as an ONNX file, a PyTorch program or C, by the path's suffix.

    The batch size is dynamic where the network allows it. Before the file is written, it is compared with the network
    on two batch sizes, in onnxruntime or as read back by PyTorch. An older file is replaced in one step.

    Args:
        network: a plain network, exported in eval mode; or a Bayesian one, of which `samples` draws are exported as one
            graph with the outputs "mean", "variance", "entropy", "aleatoric" and "epistemic" of `predict`; or the
            result of `quantise`, whose codes are stored in an ONNX file as integers of 8 or 16 bits, and in C as bytes;
            or several plain networks, which may differ in shape (slim members of an ensemble), as one graph with the
            same outputs as a Bayesian network.
        path: ends in ".onnx" (needs the extra `bayeslim[onnx]`), ".pt2" (whose readers must trust it, as PyTorch
            unpickles parts of it; folders of `bayeslim.save` are safe to read) or ".c" (self-contained C99 with a
            header beside it; zeros cost neither time nor bytes; `load_c` runs it).
        example: inputs: a tensor, a tuple of arguments or a dict.
        likelihood: the likelihood of the outputs, needed for several networks.
        samples: the number of draws of a Bayesian network; for particles, all of them if not given.
        generator: the source of randomness; with the same one `predict(how="sample")` draws the same networks.
        sparse: store weights of an ONNX file sparsely where that is smaller.
        int8: quantise the weights of an ONNX file to 8 bits and compute in integers; `difference` holds the error.
            A quantised network keeps its own codes and scales, and its activations get the ranges that they have on the
            example, which should be a batch of typical inputs.
        tolerance: the relative difference allowed.

    Raises:
        ExportFailed: if the file does not give the network's outputs.
        UnsupportedModel: if the network cannot be exported.
        ValueError: if a parameter is not finite.
        MissingExtra: if a package for ONNX is not installed.
    """
    target = Path(path)
    network = list(network) if isinstance(network, (list, tuple)) else network
    _check(network, target, samples, sparse, int8)
    check_number("tolerance", tolerance, least=0)
    _check_members(network, likelihood)
    names: Sequence[str] | None = None
    plain: nn.Module
    if isinstance(network, (Bayesian, list)):
        if isinstance(network, Bayesian):
            plain = ensemble(network, samples, generator)
        else:
            assert likelihood is not None
            plain = Ensemble([evaluating_copy(member) for member in network], copy.deepcopy(likelihood)).eval()
        names, example = OUTPUTS, (example,)
    else:
        assert isinstance(network, (nn.Module, Quantised))
        plain = evaluating_copy(network.network if isinstance(network, Quantised) else network)
    plain = plain.cpu().requires_grad_(False)
    _check_finite(plain)
    example = to_device(example, "cpu")
    run_example(plain, example)
    inputs = batches(plain, example)
    if target.suffix == ".onnx" and isinstance(network, Quantised):
        content, gap = to_integer_onnx(network, plain, inputs, example, tolerance, int8=int8)
    elif target.suffix == ".onnx":
        content, gap = to_onnx(plain, inputs, tolerance, names, sparse=sparse, int8=int8)
    elif target.suffix == ".c":
        source, gap = to_c(plain, target.stem, inputs, tolerance, network if isinstance(network, Quantised) else None)
        write_file(target.with_suffix(".h"), source.header.encode())
        content = source.code.encode()
    else:
        content, gap = to_program(plain, inputs, tolerance)
    write_file(target, content)
    return Exported(target, target.suffix[1:], len(content), gap, len(inputs) > 1)


def _check_finite(network: nn.Module) -> None:
    for name, parameter in network.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(
                f'"{name}" of {type(network).__name__} holds NaN or infinite values, so the file could not be compared '
                "with the network. Repair or retrain the network first."
            )


def _check_members(network: Any, likelihood: Likelihood | None) -> None:
    if not isinstance(network, list):
        if likelihood is not None:
            raise ValueError("likelihood says what several networks predict together. For one network, leave it out.")
        return
    if not network or not all(isinstance(m, nn.Module) and not isinstance(m, Bayesian) for m in network):
        raise TypeError("Several networks must be plain torch.nn.Modules, such as bl.compact gives, at least one.")
    if likelihood is None:
        raise ValueError(
            "Several networks are averaged as probabilities or values: pass likelihood=bl.likelihoods.Categorical(), "
            "or that of their outputs."
        )


def _check(network: Any, target: Path, samples: int | None, sparse: bool, int8: bool) -> None:
    if not isinstance(network, (nn.Module, Quantised, list)):
        raise TypeError(
            "export takes a Bayesian, a torch.nn.Module, a list of these modules or the result of quantise. Got "
            f"{type(network).__name__}."
        )
    if target.suffix not in (".onnx", ".pt2", ".c"):
        raise ValueError(f'The path must end in ".onnx", ".pt2" or ".c", which chooses the format. Got "{target}".')
    if target.suffix == ".c" and isinstance(network, (Bayesian, list)):
        raise ValueError("A C file holds one plain network: export bnn.mean_network(), or quantise(bnn).")
    if (sparse or int8) and target.suffix != ".onnx":
        raise ValueError(f'sparse and int8 are for ".onnx" files. Got "{target}".')
    if sparse and isinstance(network, Quantised):
        raise ValueError("A quantised network is stored by its codes: leave sparse=True out, or export its .network.")
    if sparse and int8:
        raise ValueError("sparse and int8 cannot be combined: onnxruntime reads sparse floats only. Choose one.")
    particles = isinstance(network, Bayesian) and isinstance(network.state.get("posterior"), Particles)
    drawn = isinstance(network, Bayesian) and not isinstance(network.method, PointNetwork)
    if drawn and samples is None and not particles:
        raise ValueError(
            "A Bayesian network is exported as an ensemble: pass samples=8 (or how many you want). "
            "For its mean alone, export bnn.mean_network()."
        )
    if samples is not None and not isinstance(network, Bayesian):
        raise ValueError("samples are drawn from a posterior, and a plain network has none. Pass the Bayesian network.")
    if target.is_dir():
        raise BayeslimError(f"{target} is a folder. Choose the path of a file.")
