"""`load_c`: a network in C, compiled, as a function of tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayeslim.errors import BayeslimError, CorruptFile, ShapeMismatch
from bayeslim.export.c.source import identifier

FLAGS = ("-std=c99", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")


class CNetwork:
    """A compiled network: it takes a float32 tensor with a batch dimension and returns one.

    Calls may run in parallel: each thread has scratch memory of its own.

    Args:
        library: the shared library.
        name: the prefix of its functions.
        path: the file that it comes from.
    """

    def __init__(self, library: ctypes.CDLL, name: str, path: Path):
        try:
            self._run, self._run_batch = library[f"{name}_run"], library[f"{name}_run_batch"]
            self.input_shape = _shape(library, f"{name}_input_shape")
            self.output_shape = _shape(library, f"{name}_output_shape")
            self._work = tuple((ctypes.c_size_t * 2).in_dll(library, f"{name}_work"))
        except (AttributeError, ValueError) as error:
            raise CorruptFile(
                f"{path} has no network called {name}. Pass the name of the .c file as name=..., or export it again."
            ) from error
        for function in (self._run, self._run_batch):
            function.restype = None
        self._run.argtypes = [ctypes.c_void_p] * 3
        self._run_batch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self.path, self.name, self._local = path, name, threading.local()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute a batch, float32 of shape (batch, *input_shape)."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{self.name} takes a tensor. Got {type(x).__name__}: pass torch.as_tensor(x).")
        if x.shape[1:] != self.input_shape or not x.ndim:
            raise ShapeMismatch(
                f"{self.name} takes inputs of shape (batch, {', '.join(map(str, self.input_shape))}). "
                f"Got {tuple(x.shape)}."
            )
        rows = len(x)
        if not _is_plain(x):
            x = x.detach().to("cpu", torch.float32).contiguous()
        outputs = torch.empty((rows, *self.output_shape))
        if rows == 1:
            self._run(x.data_ptr(), outputs.data_ptr(), self._scratch())
        else:
            self._run_batch(x.data_ptr(), outputs.data_ptr(), rows, self._scratch())
        return outputs

    def bind(self, x: Tensor) -> Callable[[], Tensor]:
        """Return a function that computes a batch again and again, into the same memory.

        Args:
            x: as in a call; contiguous float32 numbers of the CPU.

        Raises:
            ValueError: if `x` is of another kind.
        """
        if not _is_plain(x):
            raise ValueError(
                "bind reads the memory of x itself, which must hold contiguous float32 numbers on the CPU. Got "
                f'{x.dtype} on {x.device}. Pass x.to("cpu", torch.float32).contiguous().'
            )
        outputs = self(x)
        work = np.empty(max(self._work), np.float32)
        inputs, results, scratch = map(ctypes.c_void_p, (x.data_ptr(), outputs.data_ptr(), work.ctypes.data))
        arguments = (inputs, results, scratch) if len(x) == 1 else (inputs, results, len(x), scratch)
        function = self._run if len(x) == 1 else self._run_batch
        kept = (x, outputs, work)  # their memory is read and written by each call

        def run() -> Tensor:
            function(*arguments)
            return kept[1]

        return run

    def _scratch(self) -> int:
        """Return the address of this thread's scratch memory."""
        address: int | None = getattr(self._local, "address", None)
        if address is None:
            self._local.memory = np.empty(max(self._work), np.float32)
            address = self._local.address = int(self._local.memory.ctypes.data)
        return address

    def __repr__(self) -> str:
        return f"CNetwork {self.path}: {self.input_shape} to {self.output_shape}"


def load_c(path: str | os.PathLike[str], *, name: str | None = None) -> CNetwork:
    """Load a network that `export` wrote as C.

    Args:
        path: a shared library, such as made by `cc -O3 -shared -fPIC net.c -o net.so -lm`; or the .c file itself, which
            is compiled into a temporary folder.
        name: the prefix of its functions; by default the name of the file, without "lib" and the suffix.

    Raises:
        FileNotFoundError: if there is no such file.
        BayeslimError: if there is no compiler, or it fails.
        CorruptFile: if the file is no shared library, or holds no such network.
    """
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(f"There is no file {target}.")
    own = name or identifier(target.stem.removeprefix("lib") if target.suffix != ".c" else target.stem)
    with tempfile.TemporaryDirectory() as folder:  # a loaded library outlives its file
        built = Path(folder) / f"{own}.so"
        if target.suffix == ".c":
            compile_c(target, built)
        else:
            shutil.copyfile(target, built)  # the system would give an older library of the same path again
        try:
            return CNetwork(ctypes.CDLL(str(built)), own, target)
        except OSError as error:
            raise CorruptFile(f"{target} cannot be loaded: {error}. Compile the .c file on this machine.") from error


def _is_plain(x: Tensor) -> bool:
    """Check whether the functions of a network can read a tensor's memory."""
    return x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu"


def find_compiler() -> str | None:
    """Find a C compiler: $CC, or cc, gcc or clang of the path."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)


def compile_c(source: Path, target: Path) -> None:
    """Compile a C file into a shared library.

    Raises:
        BayeslimError: if there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BayeslimError("No C compiler was found. Install gcc or clang, or name one in the variable CC.")
    command = [compiler, *FLAGS, str(source), "-o", str(target), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BayeslimError(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")


def _shape(library: ctypes.CDLL, symbol: str) -> tuple[int, ...]:
    rank = ctypes.c_size_t.in_dll(library, symbol).value
    values = (ctypes.c_size_t * (rank + 1)).in_dll(library, symbol)
    return tuple(values)[1:]
