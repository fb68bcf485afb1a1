"""Coded files: every network comes back to the bit; every other file is refused."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
from bayeslim.coding.architecture import _code_name, _code_text
from bayeslim.coding.coders import Writer
from bayeslim.coding.content import MAGIC, VERSION
from bayeslim.errors import BayeslimError, CorruptFile, UnsupportedModel


def round_(network, levels=7, density=0.1, seed=0, dtype=torch.float32):
    """Random sparse values on a grid for every weight, and finer ones for vectors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            most = levels if parameter.ndim > 1 else 15
            codes = torch.randint(-most, most + 1, parameter.shape, generator=generator)
            kept = torch.rand(parameter.shape, generator=generator) < (density if parameter.ndim > 1 else 0.8)
            scale = (torch.rand((), generator=generator) + 0.1).to(torch.bfloat16).float()
            parameter.copy_((codes * kept).float() * scale)
    return network.to(dtype)


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype and a[n].shape == b[n].shape for n in a
    )


class Odd(nn.Module):
    """Tied weights, a scalar, an empty tensor, a buffer of integers, one of booleans, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.nothing = nn.Parameter(torch.zeros(4, 0))
        self.register_buffer("steps", torch.tensor([3, -7, 1 << 60]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("passing", torch.ones(2), persistent=False)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_networks_come_back_to_the_bit(tmp_path, data):
    inputs, units, outputs = (data.draw(st.integers(1, 30)) for _ in range(3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
    density = data.draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    levels = data.draw(st.sampled_from([1, 7, 100, 1000]))
    network = nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, outputs))
    round_(network, levels, density, data.draw(st.integers(0, 99)), dtype)
    path = tmp_path / "network.bayes"
    encoded = bl.encode(network, path, raw=True)
    assert same(bl.decode(path, model=network), network)
    assert encoded.bytes == os.path.getsize(path)
    assert sum(encoded.parts.values()) == pytest.approx(encoded.bytes, abs=1.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_floats_as_they_are(tmp_path, dtype):
    network = nn.Sequential(nn.Linear(30, 20, dtype=dtype), nn.Linear(20, 3, dtype=dtype))
    with torch.no_grad():
        network[0].weight[:, ::2] = 0
        network[0].weight[0, 1] = float("nan")
        network[0].weight[1, 1] = float("-inf")
    with pytest.raises(ValueError, match=r"0\.weight.*no grid.*raw=True"):
        bl.encode(network, tmp_path / "network.bayes")
    assert not (tmp_path / "network.bayes").exists()
    encoded = bl.encode(network, tmp_path / "network.bayes", raw=True)
    found = bl.decode(tmp_path / "network.bayes", network)
    for a, b in zip(found.parameters(), network.parameters(), strict=True):
        assert torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8))
    stored = sum(t.count_nonzero().item() * t.element_size() for t in network.parameters())
    assert encoded.bytes < stored


@pytest.mark.parametrize("name", ["lenet_300_100", "lenet5"])
def test_the_zoo_needs_no_model_and_few_bytes_for_its_name(tmp_path, name):
    network = round_(bl.zoo.create(name), density=0.004)
    encoded = bl.encode(network, tmp_path / "slim.bayes")
    found = bl.decode(tmp_path / "slim.bayes")
    assert same(found, network)
    assert found.zoo_config == network.zoo_config
    assert encoded.header < 24


def test_arguments_that_are_not_the_usual_ones(tmp_path):
    network = round_(bl.zoo.mlp(20, inputs=49, classes=3, dropout=0.25))
    bl.encode(network, tmp_path / "slim.bayes")
    found = bl.decode(tmp_path / "slim.bayes")
    assert same(found, network)
    assert found.zoo_config == network.zoo_config


def test_arguments_too_large_for_a_file_to_be_trusted_with(tmp_path):
    network = round_(bl.zoo.mlp(1, inputs=300_000, classes=2, depth=1), density=0.001)
    bl.encode(network, tmp_path / "slim.bayes")
    with pytest.raises(BayeslimError, match="model="):
        bl.decode(tmp_path / "slim.bayes")
    assert same(bl.decode(tmp_path / "slim.bayes", model=network), network)


def test_other_types_of_the_zoo(tmp_path):
    network = round_(bl.zoo.lenet_300_100(), density=0.003).half()
    bl.encode(network, tmp_path / "slim.bayes", raw=True)
    assert same(bl.decode(tmp_path / "slim.bayes"), network)


@pytest.mark.parametrize("name", ["lenet_300_100", "lenet5"])
def test_sorted_units_give_the_same_answers_in_fewer_bytes(tmp_path, name):
    network = round_(bl.zoo.create(name), density=0.005)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    x = torch.randn(3, 1, 28, 28)
    in_place = bl.encode(network, tmp_path / "a")
    in_order = bl.encode(network, tmp_path / "b", example=x)
    assert in_order.bytes < in_place.bytes - 20
    found = bl.decode(tmp_path / "b")
    assert torch.allclose(found(x), network(x), atol=1e-4)
    assert not same(found, network)
    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[key])
        assert torch.equal(found.state_dict()[key].flatten().sort().values, tensor.flatten().sort().values)


def test_statistics_of_batch_norms_go_with_their_units(tmp_path):
    """Also of units that are silent on the example, where a check of answers would see nothing."""
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, eps=0.0), nn.ReLU(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, 0, 0], [1, 1, 0]]))
        network[0].bias.zero_()
        network[1].running_mean.copy_(torch.tensor([8.0, 16.0]))
        network[3].weight.copy_(torch.tensor([[1.0, 2], [2, -1]]))
        network[3].bias.copy_(torch.tensor([0.5, -0.5]))
    bl.encode(network, tmp_path / "a", example=torch.randn(16, 3))
    found = bl.decode(tmp_path / "a", model=network).eval()
    x = torch.tensor([[12.0, 0, 0], [0, 20.0, 0], [9.0, 9.0, 0]])
    torch.testing.assert_close(found(x), network(x))
    assert found[1].running_mean.tolist() == [16.0, 8.0]


def test_units_that_cannot_change_places_stay(tmp_path):
    """Channels that a grouped convolution, or the user's own code, tells apart."""

    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)) * torch.linspace(0, 1, 8))

    network = round_(Told(), density=0.5)
    bl.encode(network, tmp_path / "a", example=torch.randn(4, 6))
    found = bl.decode(tmp_path / "a", network)
    x = torch.randn(5, 6)
    assert torch.allclose(found(x), network(x), atol=1e-5)


@pytest.mark.parametrize("name", ["lenet_300_100", "lenet5"])
def test_compacted_networks_of_the_zoo(tmp_path, name):
    network = bl.zoo.create(name)
    with torch.no_grad():
        for index, parameter in enumerate(network.parameters()):
            if parameter.ndim > 1 and index < len(list(network.parameters())) - 2:
                parameter[parameter.shape[0] // 3 :] = 0
    x = torch.randn(2, 1, 28, 28)
    slim = round_(bl.compact(network, example=x), density=0.02)
    assert slim.state_dict()[next(iter(slim.state_dict()))].shape[0] < next(network.parameters()).shape[0]
    encoded = bl.encode(slim, tmp_path / "slim.bayes")
    found = bl.decode(tmp_path / "slim.bayes")
    assert same(found, slim)
    assert str(found) == str(slim)
    assert torch.equal(found(x), slim(x))
    assert encoded.header < 28


def test_batch_norms_and_their_statistics(tmp_path):
    network = bl.zoo.vgg(width=0.05)
    network(torch.randn(4, 3, 32, 32))
    round_(network, density=0.05)
    bl.encode(network, tmp_path / "slim.bayes", raw=True)
    assert same(bl.decode(tmp_path / "slim.bayes"), network)


def test_ties_scalars_and_buffers(tmp_path):
    network = round_(Odd(), density=0.5)
    with torch.no_grad():
        network.scale.fill_(0.75)
    bl.encode(network, tmp_path / "odd.bayes")
    model = Odd()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = bl.decode(tmp_path / "odd.bayes", model=model)
    assert same(found, network)
    assert found.second.weight is found.first.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_step_for_each_unit_and_tables(tmp_path):
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(50, 40, bias=False), nn.Linear(40, 50, bias=False), nn.Linear(50, 40, bias=False))
    table = torch.randn(15, generator=generator).to(torch.bfloat16).float()
    with torch.no_grad():
        scales = torch.rand(40, 1, generator=generator).to(torch.bfloat16).float() + 0.1
        network[0].weight.copy_(torch.randint(-7, 8, (40, 50), generator=generator) * scales.to(torch.bfloat16).float())
        for layer in network[1:]:
            layer.weight.copy_(table[torch.randint(0, 15, layer.weight.shape, generator=generator)])
    encoded = bl.encode(network, tmp_path / "network.bayes")
    assert same(bl.decode(tmp_path / "network.bayes", network), network)
    assert encoded.parts["0.weight", "values"] < 2000 * 4 / 8 + 40 * 4
    first, second = (encoded.parts[f"{layer}.weight", "values"] for layer in (1, 2))
    assert first < 2000 * 3.91 / 8 + 15 * 2 + 30
    assert second < first - 15  # the table is there already


def test_the_same_network_is_the_same_bytes(tmp_path):
    network = round_(bl.zoo.lenet_300_100(), density=0.003)
    for name in "ab":
        bl.encode(network, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_bytes_of_the_format(tmp_path):
    """A file of version 5, byte by byte: a format that reads it otherwise needs another version."""
    network = nn.Linear(6, 4)
    with torch.no_grad():
        network.weight.copy_(
            torch.tensor([[0, 0, 1, 0, 2, 0], [0] * 6, [-1, 0, 0, 0, 0, 3], [0, 0, 1, 1, 0, 0]]) * 0.375
        )
        network.bias.copy_(torch.tensor([0.5, 0, -1.5, 1.0]))
    (tmp_path / "a").write_bytes(bytes.fromhex("6273053ca8bcf3cd7ac4308741bb4de7128a3c443d"))
    assert same(bl.decode(tmp_path / "a", nn.Linear(6, 4)), network)


def test_files_of_an_older_version_are_refused(tmp_path):
    """A valid file of version 4, which coded the same network."""
    (tmp_path / "a").write_bytes(bytes.fromhex("6273043ca8bcf3cd1cc9603107d493ba5015d0a3a7bd"))
    with pytest.raises(CorruptFile, match=r"has version 4; this bayeslim reads version 5.*encode it again"):
        bl.decode(tmp_path / "a", nn.Linear(6, 4))


@pytest.mark.parametrize("settings", [{"bits": 3}, {"bits": 4, "per": "unit"}, {"bits": 4, "codebook": "kmeans"}])
def test_what_quantise_returns(tmp_path, settings):
    x, y = torch.randn(200, 16), torch.randint(0, 3, (200,))
    network = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 3))
    bnn = bl.bayesianize(network, bl.Laplace(structure="diag"), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, y)])
    quantised = bl.quantise(bnn, **settings)
    encoded = bl.encode(quantised, tmp_path / "slim.bayes")
    assert same(bl.decode(tmp_path / "slim.bayes", model=network), quantised.network)
    assert encoded.bytes < 1.1 * quantised.coded_bytes + 100


def test_the_table_of_parts(tmp_path):
    encoded = bl.encode(round_(bl.zoo.lenet_300_100(), density=0.003), tmp_path / "slim.bayes")
    text = repr(encoded)
    assert f"{encoded.bytes:,} bytes" in text
    assert all(name in text for name in ("fc1.weight", "fc3.bias", "positions", "values", "header", "266,610"))
    assert encoded.total("positions") + encoded.total("values") + encoded.header == pytest.approx(
        encoded.bytes, abs=1.1
    )


def test_sizes_are_near_the_entropy(tmp_path):
    """Unstructured weights: no more than 2 % above the entropy of positions and values, and a constant."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Linear(1000, 300, bias=False)
    probabilities = torch.tensor([0.05, 0.15, 0.3, 0.3, 0.15, 0.05])
    levels = torch.tensor([-3, -2, -1, 1, 2, 3]) * 0.125
    kept = torch.rand(300, 1000, generator=generator) < 0.02
    chosen = levels[torch.multinomial(probabilities, 300_000, replacement=True, generator=generator)].view(300, 1000)
    with torch.no_grad():
        network.weight.copy_(chosen * kept)
    encoded = bl.encode(network, tmp_path / "a")
    p = kept.double().mean()
    of_positions = 300_000 * -(p * p.log2() + (1 - p) * (1 - p).log2()).item() / 8
    of_values = int(kept.sum()) * -(probabilities * probabilities.log2()).sum().item() / 8
    assert encoded.total("positions") < 1.02 * of_positions + 16
    assert encoded.total("values") < 1.02 * of_values + 16
    assert encoded.bytes > 0.97 * (of_positions + of_values)


def test_every_damaged_byte_and_every_length_is_refused(tmp_path):
    network = round_(nn.Linear(12, 9), density=0.2)
    path = tmp_path / "a"
    bl.encode(network, path)
    content = path.read_bytes()
    for place in range(len(content)):
        for flip in (1, 0x80, 0xFF):
            path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
            with pytest.raises(CorruptFile):
                bl.decode(path, network)
        path.write_bytes(content[:place])
        with pytest.raises(CorruptFile):
            bl.decode(path, network)
    path.write_bytes(content + b"\0")
    with pytest.raises(CorruptFile, match="checksum"):
        bl.decode(path, network)


def signed(content):
    return content + zlib.crc32(content).to_bytes(4, "big")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hostile_files_with_good_checksums_do_no_harm(tmp_path, data):
    """Any bytes decode to a network or raise `CorruptFile`."""
    network = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 3))
    path = tmp_path / "a"
    if not path.exists():
        bl.encode(round_(nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 3)), density=0.3), path)
        (tmp_path / "b").write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "b").read_bytes()[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(3, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(signed(bytes(content[: data.draw(st.integers(3, len(content)))])))
    try:
        found = bl.decode(path, network)
    except BayeslimError:
        return
    assert {n: t.shape for n, t in found.state_dict().items()} == {n: t.shape for n, t in network.state_dict().items()}


def header(name, text="", kind=1):
    """A file that names a network of the zoo and ends there."""
    writer = Writer()
    writer.uniform(kind, 3)
    _code_name(writer, name)
    _code_text(writer, text)
    return signed(MAGIC + bytes([VERSION]) + writer.finish() + b"\0" * 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("lenet7", "", "does not have"),
        ("lenet5", '{"classes":1000000000}', "far larger"),
        ("lenet5", '{"classes":9999,"in_channels":9999,"image_size":9999}', "far larger"),
        ("lenet5", '{"classes":"many"}', "does not have"),
        ("lenet5", '{"colour":1}', "does not have"),
        ("lenet5", '{"classes":', "does not have"),
        ("lenet5", "[1]", "does not have"),
        ("lenet5", "\u00ff", "does not"),
    ],
)
def test_networks_that_a_file_must_not_name(tmp_path, name, text, message):
    path = tmp_path / "a"
    path.write_bytes(header(name, text))
    with pytest.raises(CorruptFile, match=message):
        bl.decode(path)


def test_foreign_files(tmp_path):
    path = tmp_path / "a"
    for content in (b"", b"bs", b"PK\3\4" + bytes(100), bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(CorruptFile, match="not written by"):
            bl.decode(path)
    for version in (VERSION - 1, VERSION + 1):
        path.write_bytes(signed(MAGIC + bytes([version]) + b"abcdef"))
        with pytest.raises(CorruptFile, match=f"has version {version}"):
            bl.decode(path)
    with pytest.raises(FileNotFoundError):
        bl.decode(tmp_path / "nowhere")
    with pytest.raises(CorruptFile, match="folder"):
        bl.decode(tmp_path)


def test_a_compacted_network_comes_back_by_what_was_saved_of_it(tmp_path):
    network = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))
    x = torch.rand(20, 12)
    bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, torch.randint(3, (20,)))], progress=False)
    small = bl.compact(
        bl.prune(bnn, bl.plan(bnn, bl.Budget(sparsity=0.5), granularity="unit", example=x)), x, bayesian=True
    )
    quantised = bl.quantise(small)
    bl.encode(quantised, tmp_path / "slim.bayes", example=x)
    bl.save(small, tmp_path / "small")
    found = bl.decode(tmp_path / "slim.bayes", model=bl.load(tmp_path / "small", model=network))
    assert found[0].out_features < 9
    torch.testing.assert_close(found(x), quantised.network(x))


def test_models_that_do_not_fit(tmp_path):
    path = tmp_path / "a"
    bl.encode(round_(nn.Linear(12, 9)), path)
    with pytest.raises(BayeslimError, match=r"model=YourModel\(\)"):
        bl.decode(path)
    for other in (nn.Linear(12, 8), nn.Linear(12, 9, bias=False), nn.Linear(12, 9).double(), nn.Conv1d(12, 9, 1)):
        with pytest.raises(CorruptFile, match="does not fit"):
            bl.decode(path, model=other)
    with pytest.raises(TypeError, match="model must be"):
        bl.decode(path, model="Linear")
    bl.encode(round_(bl.zoo.lenet5(), density=0.001), path)
    with pytest.raises(CorruptFile, match="does not fit"):
        bl.decode(path, model=bl.zoo.lenet5(classes=11))


def test_what_cannot_be_coded(tmp_path):
    bnn = bl.bayesianize(nn.Linear(3, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    for wrong in (bnn, "network", {"weight": torch.zeros(3)}):
        with pytest.raises(TypeError, match="plain"):
            bl.encode(wrong, tmp_path / "a")
    strange = nn.Linear(3, 2)
    strange.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedModel, match="phase"):
        bl.encode(strange, tmp_path / "a")
    with pytest.raises(BayeslimError, match="folder"):
        bl.encode(round_(nn.Linear(3, 2)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a"
    bl.encode(round_(nn.Linear(3, 2)), path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(BayeslimError, match="No space left"):
        bl.encode(round_(nn.Linear(3, 2), seed=1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_statistics_of_batch_norms_are_stored_as_they_are_beside_quantised_weights(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=20)
    bnn.loss((torch.randn(20, 4), torch.randint(0, 3, (20,))))  # a pass in training mode, which moves the statistics
    quantised = bl.quantise(bnn)
    bl.encode(quantised, tmp_path / "normed.bayes")
    assert same(bl.decode(tmp_path / "normed.bayes", model=network), quantised.network)
    with pytest.raises(ValueError, match="running_mean"):
        bl.encode(quantised.network, tmp_path / "normed.bayes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_values_on_a_grid_are_taken_even_where_storing_them_as_they_are_is_shorter(tmp_path, dtype):
    network = nn.Linear(3, 1, bias=False).to(dtype)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[0.0, 0.125, 0.375]]))
    bl.encode(network, tmp_path / "a")
    assert same(bl.decode(tmp_path / "a", nn.Linear(3, 1, bias=False).to(dtype)), network)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
def test_unsigned_buffers(tmp_path, dtype):
    def network(values):
        found = nn.Module()
        found.register_buffer("counts", torch.tensor(values).to(dtype))
        return found

    bl.encode(network([0, 7, 255]), tmp_path / "a")
    assert bl.decode(tmp_path / "a", network([0, 0, 0])).counts.tolist() == [0, 7, 255]


@pytest.mark.parametrize("config", ['{"depth":20000,"hidden":1}', '{"depth":262144}'])
def test_networks_too_deep_to_be_made(tmp_path, config):
    (tmp_path / "a").write_bytes(header("mlp", config))
    with pytest.raises(CorruptFile, match="far larger"):
        bl.decode(tmp_path / "a")
