"""A pretrained voice encoder, cut without retraining by four rules.

    python benchmarks/voice_encoder.py prepare --wheel Resemblyzer-0.1.4-py3-none-any.whl \
        --sounds /usr/share/asterisk/sounds --to FOLDER
    python benchmarks/voice_encoder.py cut --data FOLDER

The network is Resemblyzer's encoder of 1.4 million weights, from the wheel `Resemblyzer` 0.1.4: three LSTM layers of
256 units read 160 frames of 40 mels, then Linear and ReLU, and the embedding of a voice has unit length. The speech is
that of Debian's packages `asterisk-core-sounds-{en,es,fr,it,ru}-wav`: telephone prompts of 8 kHz by four speakers.

`prepare` writes weights and spectrograms (`mel_spectrograms.py`): 16 kHz, -30 dBFS or louder, 25 ms windows every 10
ms, 40 mels after Slaney, power without a logarithm. Silence is dropped by energy alone; the encoder was made for a
detector of voice. The first two stretches of 160 frames of every file are kept.

`cut` measures the mean cosine between embeddings of the cut and of the dense network, for two kinds of test utterances:
"new voices", the French and the Russian speaker, and "known voices", phrases in English, Spanish and Italian that no
calibration utterance says. The likelihood is Gaussian around the dense network's embeddings. They have unit length, so
that a squared error is 2 (1 − cosine), and the Gauss-Newton curvature is that of the metric. "kron" has Kronecker
factors over time steps, at once or in five steps with the curvature measured again; "diag" has a diagonal curvature,
"magnitude" cuts the smallest weights. Giving every voice the mean calibration embedding has the cosine "constant".

The three layers are cut as layers of their own, so that each loses the units that it needs least. In one `nn.LSTM` of
three layers, which computes the same, all have one width, and the units of one number go in all three; "stacked unit"
is a cut of that. Every finished cell is written at once and not computed again, as long as settings and data are the
same.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, save
from mel_spectrograms import MELS, STEP, mel_power, read, without_silence
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bayeslim as bl

NAME = "voice_encoder"
WEIGHTS, SPEECH = "weights.safetensors", "speech.safetensors"
FRAMES = 160
CALIBRATE = ("en", "es", "it")
"""The languages whose files calibrate, but for one phrase in five: one woman speaks two of them, one man the third."""
STRETCHES = 2

WEIGHTS_CUT = (0.5, 0.7, 0.8)
UNITS_CUT = (0.2, 0.4)
STEPS = 5
STEPWISE = f"kron in {STEPS} steps"
RULES = ("magnitude", "diag", "kron", STEPWISE)
NOISE = 0.1
BATCH = 64
SAME = 1e-5
"""The largest difference between embeddings of the cut and of the compacted network."""
ROUNDS = 15


class VoiceEncoder(nn.Module):
    """Embeddings of unit length, (B, 160, 40) to (B, 256).

    Args:
        mels: the number of inputs of a frame.
        width: of every layer.
        layers: how many.
        stacked: whether one `nn.LSTM` holds all layers.
    """

    def __init__(self, mels: int = MELS, width: int = 256, layers: int = 3, stacked: bool = True):
        super().__init__()
        self.lstm: nn.Module = nn.LSTM(mels, width, layers, batch_first=True)
        if not stacked:
            self.lstm = nn.ModuleList(nn.LSTM(width if k else mels, width, batch_first=True) for k in range(layers))
        self.linear = nn.Linear(width, width)

    def forward(self, frames: Tensor) -> Tensor:
        """Embed spectrograms."""
        x = frames
        for lstm in self.lstm if isinstance(self.lstm, nn.ModuleList) else [self.lstm]:
            x, _ = lstm(x)
        return nn.functional.normalize(self.linear(x[:, -1]).relu(), dim=1)


def prepare(wheel: Path, sounds: Path, folder: Path) -> None:
    """Write the weights and the spectrograms."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = zipfile.ZipFile(wheel).read("resemblyzer/pretrained.pt")
    weights = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)["model_state"]
    save_file({name: weights[name] for name in VoiceEncoder().state_dict()}, folder / WEIGHTS)
    found: dict[str, list[Tensor]] = {}
    for file in sorted(sounds.rglob("*.wav")):
        if file.parent.name == "silence" or file.stem == "tt-monkeys" or file.stat().st_size < FRAMES * STEP:
            continue  # no speech, or less than an utterance of it
        language = file.relative_to(sounds).parts[0][:2]
        frames = mel_power(without_silence(read(file)))
        held_out = hashlib.sha256(file.stem.encode()).digest()[0] % 5 == 0
        part = "calibration" if language in CALIBRATE and not held_out else f"test, {language}"
        found.setdefault(part, []).extend(frames[: len(frames) // FRAMES * FRAMES].view(-1, FRAMES, MELS)[:STRETCHES])
    save_file({part: torch.stack(each) for part, each in found.items()}, folder / SPEECH)
    for part, each in found.items():
        print(f"{part}: {len(each)} utterances")


def dense(folder: Path, stacked: bool = True) -> VoiceEncoder:
    """Load the encoder that `prepare` wrote."""
    weights = load_file(folder / WEIGHTS)
    (_, mels), (_, width) = (weights[f"lstm.weight_{side}_l0"].shape for side in ("ih", "hh"))
    layers = sum(name.startswith("lstm.weight_hh") for name in weights)
    if not stacked:
        weights = {re.sub(r"^lstm\.(.*)_l(\d+)$", r"lstm.\2.\1_l0", name): weight for name, weight in weights.items()}
    network = VoiceEncoder(mels, width, layers, stacked)
    network.load_state_dict(weights)
    return network.eval()


@torch.no_grad()
def embeddings(network: nn.Module, frames: Tensor) -> Tensor:
    return torch.cat([network(part) for part in frames.split(BATCH)])


class Trial:
    """The dense network, its embeddings, and the posteriors of calibration seeds."""

    def __init__(self, folder: Path, utterances: int):
        self.network, self.utterances = dense(folder), utterances
        self.speech = load_file(folder / SPEECH)
        self.targets = {part: embeddings(self.network, frames) for part, frames in self.speech.items()}
        self.networks = {"weight": dense(folder, stacked=False), "stacked unit": self.network}
        self.networks["unit"] = self.networks["weight"]
        self.fits: dict[tuple[str, bool, int], tuple[bl.Bayesian, float]] = {}

    def loader(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Choose calibration utterances and the dense network's embeddings of them."""
        generator = torch.Generator().manual_seed(seed)
        frames, targets = self.speech["calibration"], self.targets["calibration"]
        chosen = torch.randperm(len(frames), generator=generator)[: self.utterances]
        return [(frames[some], targets[some]) for some in chosen.split(BATCH)]

    def fitted(self, structure: str, what: str, seed: int) -> tuple[bl.Bayesian, float]:
        """Fit a posterior once; return also the CPU seconds."""
        key = structure, what == "stacked unit", seed
        if key not in self.fits:
            self.fits.clear()  # one posterior at a time in memory
            likelihood = bl.likelihoods.Gaussian(NOISE)
            bnn = bl.bayesianize(self.networks[what], bl.Laplace(structure, curvature="signs"), likelihood=likelihood)
            _, seconds = timed(lambda: bnn.fit(self.loader(seed), tune="evidence", seed=seed, progress=False))
            self.fits[key] = bnn, seconds
        return self.fits[key]

    def cosine(self, embed: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Compare embeddings of test utterances with the dense network's, for both kinds of voices."""
        found: dict[str, list[Tensor]] = {"new voices": [], "known voices": []}
        for part, frames in self.speech.items():
            if part.startswith("test"):
                kind = "known voices" if part.removeprefix("test, ") in CALIBRATE else "new voices"
                found[kind].append((embed(frames) * self.targets[part]).sum(1))
        return {kind: round(float(torch.cat(each).mean()), 4) for kind, each in found.items()}

    def constant(self) -> dict[str, float]:
        """Compare the mean embedding of the calibration utterances with those of test utterances."""
        mean = nn.functional.normalize(self.targets["calibration"].mean(0), dim=0)
        return self.cosine(lambda frames: mean.expand(len(frames), -1))

    def cell(self, what: str, sparsity: float, rule: str, seed: int) -> dict[str, Any]:
        """Cut by one rule; a network that lost units is compacted, saved, exported and timed as well."""
        structure = "kron" if rule.startswith("kron") else "diag"
        bnn, fit = self.fitted(structure, what, seed)
        budget, example = bl.Budget(sparsity=sparsity), self.speech["calibration"][:2]
        options: dict[str, Any] = {"granularity": what.split()[-1], "example": example}
        seconds = {"fit": fit}
        if rule == STEPWISE:
            refresh = {"steps": STEPS, "refresh": self.loader(seed), "progress": False}
            pruned, seconds["plan and prune"] = timed(lambda: bl.prune(bnn, budget, **refresh, **options))
        else:
            criterion = "magnitude" if rule == "magnitude" else "auto"
            plan, seconds["plan"] = timed(lambda: bl.plan(bnn, budget, criterion=criterion, **options))
            pruned, seconds["prune"] = timed(lambda: bl.prune(bnn, plan))
        cut = pruned.mean_network()
        found: dict[str, Any] = {"cosine": self.cosine(lambda frames: embeddings(cut, frames))}
        if what != "weight":
            found |= self.compacted(cut, example, seconds)
        return found | {"cpu_seconds": {name: round(value, 2) for name, value in seconds.items()}}

    def compacted(self, cut: nn.Module, example: Tensor, seconds: dict[str, float]) -> dict[str, Any]:
        """Remove the cut units, check the embeddings of other utterances, and measure size and speed."""
        slim, seconds["compact"] = timed(lambda: bl.compact(cut, example=example))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _, seconds["save"] = timed(lambda: bl.save(slim, folder / "slim", example=example))
            _, seconds["export"] = timed(lambda: bl.export(slim, folder / "slim.onnx", example=example))
        frames = next(frames for part, frames in self.speech.items() if part.startswith("test"))
        off = float((embeddings(slim, frames) - embeddings(cut, frames)).abs().max())
        if off > SAME:
            raise SystemExit(f"The compacted network's embeddings differ by {off:.2g} from those of the cut network.")
        ratios = []
        for _ in range(ROUNDS):
            before, after = (timed(lambda net=net: embeddings(net, frames[:1]))[1] for net in (self.network, slim))
            ratios.append(before / after)
        return {
            "parameters": sum(p.numel() for p in slim.parameters()),
            "difference": off,
            "times_faster": round(statistics.median(ratios), 2),
        }


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """Run an action; return its result and its CPU seconds."""
    started = time.process_time()
    result = action()
    return result, time.process_time() - started


def jobs(seeds: int) -> Iterator[tuple[str, float, str, int]]:
    """List what to cut, how much of it, by which rule and with which seed."""
    cuts = {"weight": WEIGHTS_CUT, "unit": UNITS_CUT, "stacked unit": UNITS_CUT}
    for seed, rule, what in product(range(seeds), RULES, cuts):
        if rule == STEPWISE and what != "weight":
            continue  # it takes long
        if not seed or (rule not in ("magnitude", STEPWISE) and what != "stacked unit"):
            yield from ((what, sparsity, rule, seed) for sparsity in cuts[what])


def cut(options: argparse.Namespace) -> None:
    """Compute and save every cell that is missing."""
    trial = Trial(options.data, options.utterances)
    size = sum(p.numel() for p in trial.network.parameters())
    about = {"utterances": options.utterances, "noise": NOISE, "steps": STEPS, "parameters": size}
    about |= {"speech": {part: len(frames) for part, frames in trial.speech.items()}, "constant": trial.constant()}
    path = options.results / f"{NAME}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    cells: dict[str, Any] = found["cells"] if found.get("settings") == about else {}
    for what, sparsity, rule, seed in jobs(options.seeds):
        key = f"{sparsity:.0%} of {what}s, {rule}, seed {seed}"
        if key not in cells:
            cells[key] = trial.cell(what, sparsity, rule, seed)
            save(NAME, {"settings": about, "cells": cells}, folder=options.results)
        print(key, cells[key], flush=True)


def main() -> None:
    """Prepare the files of the benchmark, or cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    first = commands.add_parser("prepare")
    first.add_argument("--wheel", type=Path, required=True, help="the wheel of Resemblyzer 0.1.4")
    first.add_argument("--sounds", type=Path, required=True, help="the folder with one folder for every speaker")
    first.add_argument("--to", type=Path, required=True)
    second = commands.add_parser("cut")
    second.add_argument("--data", type=Path, required=True, help="the folder that `prepare` wrote")
    second.add_argument("--utterances", type=int, default=512, help="for the curvature")
    second.add_argument("--seeds", type=int, default=1)
    second.add_argument("--results", type=Path, default=RESULTS, help="the folder for the results")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.wheel, options.sounds, options.to)
    else:
        torch.set_num_threads(1)
        cut(options)


if __name__ == "__main__":
    main()
