"""Build the digit reader for every processor there is a compiler for, and run it; `make reader` calls this script.

    python examples/reader/run.py [--all] [--save]

It prints the size of the freestanding program, its answers to test digits and to images that are no digits, and
whether every processor gives the same answers. Other processors are emulated by `qemu-user`, and read some of the test
digits, or all with --all. With --save the tables also go to `results.md`, which the documentation includes.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from integers import CONFIDENCE_BITS, UNKNOWN, Array, Network

import bayeslim as bl

HERE = Path(__file__).parent
MAX_BYTES = 8_000
EMULATED_IMAGES = 1_000
FREESTANDING = ("-ffreestanding", "-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-fno-pic")
WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror")
OTHER_IMAGES = {"notmnist": "letters (notMNIST)", "kmnist": "Japanese characters (KMNIST)"}


@dataclass(frozen=True)
class Processor:
    """A kind of processor, with the prefix of its compiler and its emulator.

    Attributes:
        name: its name.
        machines: what `platform.machine` calls it.
        prefix: of its cross compiler.
        emulator: the program that runs its programs elsewhere.
        package: the Debian package of the compiler.
    """

    name: str
    machines: tuple[str, ...]
    prefix: str
    emulator: str
    package: str

    @property
    def is_here(self) -> bool:
        """Whether this machine has such a processor."""
        return platform.machine() in self.machines

    def tool(self, name: str) -> str | None:
        """Find a compiler ("gcc") or a tool ("size") for it."""
        here = shutil.which("cc" if name == "gcc" else name) if self.is_here else None
        return here or shutil.which(f"{self.prefix}-{name}")

    def missing(self) -> list[str]:
        """Name the Debian packages that are needed and not installed."""
        found = [] if self.tool("gcc") and self.tool("size") else [self.package]
        return found if self.is_here or shutil.which(self.emulator) else [*found, "qemu-user"]


PROCESSORS = (
    Processor("x86-64", ("x86_64", "AMD64"), "x86_64-linux-gnu", "qemu-x86_64", "gcc-x86-64-linux-gnu"),
    Processor("ARM, 64 bits", ("aarch64", "arm64"), "aarch64-linux-gnu", "qemu-aarch64", "gcc-aarch64-linux-gnu"),
    Processor("ARM, 32 bits", ("armv7l",), "arm-linux-gnueabihf", "qemu-arm", "gcc-arm-linux-gnueabihf"),
    Processor("RISC-V, 64 bits", ("riscv64",), "riscv64-linux-gnu", "qemu-riscv64", "gcc-riscv64-linux-gnu"),
)


@dataclass(frozen=True)
class Program:
    """The reader, built for a processor.

    Attributes:
        processor: the processor.
        path: the program that reads images from its standard input.
        bytes: text and data of the reader alone, linked without any library.
    """

    processor: Processor
    path: Path
    bytes: int

    def read(self, images: Array) -> tuple[Array, Array]:
        """Read images (N, 28, 28), uint8: answers and confidences."""
        command = [*([] if self.processor.is_here else [self.processor.emulator]), str(self.path)]
        done = subprocess.run(command, input=images.tobytes(), capture_output=True, check=True)
        answers, confidences = np.array(done.stdout.split(), np.int64).reshape(-1, 2).T
        return answers, confidences


def build(network: Network, processor: Processor, folder: Path) -> Program:
    """Compile and link the reader, freestanding for its size and with a main function to run it."""
    compiler, size = processor.tool("gcc"), processor.tool("size")
    assert compiler is not None
    assert size is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "network.h").write_text(network.header())
    object_file, alone, program = folder / "reader.o", folder / "reader.elf", folder / "reader"
    source, main = str(HERE / "reader.c"), str(HERE / "main.c")
    _run([compiler, *WARNINGS, "-Os", *FREESTANDING, f"-I{folder}", "-c", source, "-o", str(object_file)])
    linked = ["-nostdlib", "-static", "-no-pie", "-Wl,-e,reader_read", "-Wl,--build-id=none"]
    _run([compiler, *linked, str(object_file), "-o", str(alone)])
    _run([compiler, *WARNINGS, "-O2", "-static", "-no-pie", main, str(object_file), "-o", str(program)])
    text, data = _run([size, str(alone)]).splitlines()[1].split()[:2]
    return Program(processor, program, int(text) + int(data))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def pixels(x: torch.Tensor) -> Array:
    """Turn images from 0 to 1 into bytes, (N, 28, 28)."""
    found: Array = (255 * x[:, 0]).round().to(torch.uint8).numpy()
    return found


def processor_table(network: Network, images: Array, emulated: int, folder: Path) -> Iterator[str]:
    """Build the reader for every processor; compare its answers with those of the numpy reference.

    Args:
        network: the network.
        images: test digits.
        emulated: how many of them emulated processors read.
        folder: a folder for the programs.

    Raises:
        RuntimeError: if answers differ, the reader is too large, or no compiler is there.
    """
    yield "| processor | code and weights | answers to the test digits |"
    yield "|---|---|---|"
    answers, _, confidences = network.read(images)
    expected, checked = np.stack([answers, confidences]), 0
    for processor in PROCESSORS:
        missing = processor.missing()
        if missing:
            yield f"| {processor.name} | not built | not checked: install {', '.join(missing)} |"
            continue
        program = build(network, processor, folder / processor.prefix)
        if program.bytes > MAX_BYTES:
            raise RuntimeError(
                f"The reader takes {program.bytes:,} bytes on {processor.name}, more than {MAX_BYTES:,}."
            )
        count = len(images) if processor.is_here else emulated
        if not np.array_equal(np.stack(program.read(images[:count])), expected[:, :count]):
            raise RuntimeError(f"Answers on {processor.name} differ from those of the numpy reference.")
        checked += 1
        how = "" if processor.is_here else ", emulated"
        yield f"| {processor.name}{how} | {program.bytes:,} bytes | the same, {count:,} of {len(images):,} compared |"
    if not checked:
        raise RuntimeError("No C compiler was found. Install gcc.")


def digit_table(network: Network, sets: dict[str, tuple[Array, Array]]) -> Iterator[str]:
    """Measure coverage and selective risk, and the error without a threshold."""
    yield "| digits | error if it must answer | answered (coverage) | wrong answers (risk) | calibration error |"
    yield "|---|---|---|---|---|"
    for name, (images, labels) in sets.items():
        answers, digits, _ = network.read(images)
        answered = answers != UNKNOWN
        error, risk = (digits != labels).mean(), (digits != labels)[answered].mean()
        scores = torch.from_numpy(network.probabilities(images))
        gap = bl.metrics.expected_calibration_error(scores, torch.from_numpy(labels))
        yield f"| {name}, {len(images):,} | {error:.2%} | {answered.mean():.1%} | {risk:.2%} | {gap:.2%} |"


def other_table(network: Network, sets: dict[str, Array]) -> Iterator[str]:
    """Measure how many images that are no digits are refused."""
    yield "| other images | refused |"
    yield "|---|---|"
    for name, images in sets.items():
        yield f"| {name}, {len(images):,} | {(network.read(images)[0] == UNKNOWN).mean():.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", type=Path, default=HERE / "network.json")
    parser.add_argument("--all", action="store_true", help="compare the answers to all test digits, also emulated")
    parser.add_argument("--save", action="store_true", help="write the tables to results.md")
    options = parser.parse_args()
    network = Network.load(options.network)
    weights = sum(layer.codes.size for layer in network.layers)
    print(
        f"{weights:,} weights of 4 bits; answers at a confidence of {network.threshold / (1 << CONFIDENCE_BITS):.1%}\n"
    )

    data = bl.data.load("mnist").with_validation(5_000)
    digits = {
        "validation": (pixels(data.valid_x), data.valid_y.numpy()),
        "test": (pixels(data.test_x), data.test_y.numpy()),
    }
    others = {label: pixels(bl.data.load(name, part="test").test_x) for name, label in OTHER_IMAGES.items()}
    emulated = len(data.test_y) if options.all else EMULATED_IMAGES
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        tables = (
            processor_table(network, digits["test"][0], emulated, Path(folder)),
            digit_table(network, digits),
            other_table(network, others),
        )
        for table in tables:
            for line in table:
                print(line, flush=True)
                lines.append(line)
            print()
            lines.append("")
    if options.save:
        (HERE / "results.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
