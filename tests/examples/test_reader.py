"""The digit reader: C and numpy agree to the bit on every processor, within its size, and it reads digits."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import bayeslim as bl

FOLDER = Path(__file__).parents[2] / "examples" / "reader"


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    names = ("integers", "images", "rounding", "run")
    found = SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    yield found
    for name in names:
        monkeypatch.delitem(importlib.import_module("sys").modules, name)


@pytest.fixture
def network(reader):
    return reader.integers.Network.load(FOLDER / "network.json")


def enlarged(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Enlarge digits that ship with the package to 20 pixels, in a frame of 28 as MNIST has it."""
    data = bl.data.load("digits", part="test")
    x = nn.functional.interpolate(data.test_x[:count], size=(20, 20), mode="bicubic").clamp(0, 1)
    x = nn.functional.pad(x, (4, 4, 4, 4))
    return (255 * x[:, 0]).round().to(torch.uint8).numpy(), data.test_y[:count].numpy()


def any_images(count: int) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28))
    return images.astype(np.uint8)


def test_the_committed_network_reads_digits_of_other_writers(network):
    images, labels = enlarged(100)
    answers, digits, _ = network.read(images)
    assert (digits == labels).mean() > 0.6  # enlarged from 8 x 8 pixels, and unlike the training digits
    assert (answers[answers >= 0] == labels[answers >= 0]).mean() > (digits == labels).mean()
    assert (network.read(any_images(50))[0] == -1).mean() > 0.9


@pytest.mark.parametrize("number", range(4))
def test_c_and_numpy_agree_to_the_bit(reader, network, number, tmp_path):
    processor = reader.run.PROCESSORS[number]
    if processor.missing():
        pytest.skip(f"{processor.name} needs the packages {', '.join(processor.missing())}")
    images = np.concatenate([enlarged(16)[0], any_images(4), np.full((1, 28, 28), 255, np.uint8)])
    program = reader.run.build(network, processor, tmp_path)
    answers, _, confidences = network.read(images)
    assert 5_000 < program.bytes <= reader.run.MAX_BYTES == 8_000
    np.testing.assert_array_equal(np.stack(program.read(images)), np.stack([answers, confidences]))


def test_sums_are_what_64_bit_integers_give(reader, network):
    x = any_images(3)[:, None]
    layer = network.layers[0]
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.int64), (5, 5), axis=(2, 3))[:, 0, ::2, ::2]
    wanted = np.einsum("nhwij,oij->nohw", windows, layer.codes[:, 0].astype(np.int64))
    scale, bias = (values.astype(np.int64)[:, None, None] for values in (layer.multipliers, layer.biases))
    wanted = wanted * scale + bias * 2 ** (layer.shift - reader.integers.BIAS_BITS)
    np.testing.assert_array_equal(layer.sums(x), wanted)
    assert np.abs(wanted).max() <= layer.largest() < 2**31


def test_confidences_are_a_softmax(network, reader):
    images, _ = enlarged(50)
    last = network.layers[-1]
    logits = network.logits(images) / 2 ** (last.shift + reader.integers.FRACTION_BITS)
    exact = np.exp2(logits) / np.exp2(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(network.probabilities(images), exact, atol=2e-3)


def test_rounding_keeps_the_answers(reader):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5, 3), nn.ReLU(), nn.Conv2d(4, 4, 4, 2), nn.ReLU(), nn.Conv2d(4, 11, 3), nn.Flatten()
    )
    images, labels = enlarged(100)
    x, y = torch.from_numpy(images)[:, None] / 255, torch.from_numpy(labels)
    bnn = bl.bayesianize(model, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(x, y, batch_size=25), epochs=30, lr=1e-2, seed=0, progress=False)
    found = reader.rounding.rounded(bnn, x, images, labels)
    answers, digits, confidences = found.read(images)
    exact = bl.predict(bnn, x, how="map").probs[:, :10].argmax(1).numpy()
    assert (digits == exact).mean() > 0.95
    assert np.abs(np.concatenate([layer.codes.ravel() for layer in found.layers])).max() == 7
    answered = answers >= 0
    assert (answers[answered] != labels[answered]).mean() <= reader.rounding.MAX_RISK
    np.testing.assert_array_equal(answered, confidences >= found.threshold)


def test_files_keep_networks(reader, network, tmp_path):
    network.save(tmp_path / "network.json")
    again = reader.integers.Network.load(tmp_path / "network.json")
    assert again.header() == network.header()
    assert (FOLDER / "network.json").stat().st_size < 20_000


def test_a_sum_beyond_32_bits_is_refused(reader, network):
    first = network.layers[0]
    wide = reader.integers.Layer(first.codes, np.full(12, 32767, np.int16), first.biases, first.stride, 30)
    with pytest.raises(ValueError, match="more than 32 bits"):
        reader.integers.Network((wide, *network.layers[1:]), 0).header()


def test_training_images_are_digits_and_others(reader):
    images, labels = enlarged(40)
    x, y = torch.from_numpy(images)[:, None] / 255, torch.from_numpy(labels)
    batches = list(reader.images.TrainingImages(x, y, batch_size=20, others=12))
    assert len(batches) == 2
    for inputs, targets in batches:
        assert inputs.shape == (32, 1, 28, 28)
        assert 0 <= float(inputs.min()) <= float(inputs.max()) <= 1
        assert (targets[20:] == reader.images.NOT_A_DIGIT).all()
        assert (targets[:20] < 10).all()
