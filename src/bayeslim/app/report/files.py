"""How to use the files of a run: what each holds, and the lines of code that read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FileUse:
    """A file of a run: what it holds, and the code that reads it, if any."""

    name: str
    about: str
    code: str


_POSTERIOR = (
    "The pruned network with its posterior, for predictions with uncertainty; it needs the original network's class",
    'bnn = bl.load("{name}", model)\nprediction = bl.predict(bnn, x)      # .probs .entropy .aleatoric .epistemic',
)
_USES = {
    "slim": (
        "The slim network, as safetensors and JSON",
        'import bayeslim as bl\n\nslim = bl.load("{name}")\ny = slim(x)',
    ),
    "slim.onnx": (
        "The slim network for ONNX runtimes",
        'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{name}")\n'
        "y = session.run(None, {{session.get_inputs()[0].name: x.numpy()}})",
    ),
    "slim.pt2": ("The slim network as a PyTorch program", 'slim = torch.export.load("{name}").module()\ny = slim(x)'),
    "slim.c": (
        "The slim network as C99 without dependencies, to compile into a program or to call from Python",
        'slim = bl.load_c("{name}")\ny = slim(x)',
    ),
    "pruned": _POSTERIOR,
    "tuned": _POSTERIOR,
    "benchmark.json": ("Every timing of this report, with the machine", ""),
}


KNOWN_FILES = tuple(_USES)
"""Files that the report can describe."""


def uses_of(names: Sequence[str]) -> list[FileUse]:
    """Describe the files that are known by their names; others are left out."""
    return [
        FileUse(name, about, code.format(name=name))
        for name in names
        for about, code in [_USES.get(name, ("", ""))]
        if about
    ]
