"""`quantise` on networks: what it promises, what it predicts, what it refuses."""

import copy

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.app.data import Loader
from bayeslim.errors import BayeslimWarning, NoSiteMatched, NotFitted
from bayeslim.posteriors import Diagonal, Particles
from bayeslim.quantise.grids import Codebook, Uniform
from bayeslim.quantise.quantise import error_of
from bayeslim.train.fit import fit
from prune.given_posteriors import Given, diagonal, given, kronecker, mean_of, two_layers


@pytest.fixture(scope="module")
def digits():
    data = bl.data.load("digits").with_validation(200, seed=0)
    train = Loader(data.train_x.flatten(1), data.train_y, batch_size=64, seed=0)
    return data, train, [(data.valid_x.flatten(1), data.valid_y)]


@pytest.fixture(scope="module")
def laplace(digits):
    """A small network trained to its mode, and its exact curvature."""
    return trained(digits, ("diag", "kron", "full"), seed=0)


def trained(digits, structures, seed):
    torch.manual_seed(seed)
    _, train, _ = digits
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    start = bl.bayesianize(
        model, bl.Laplace("diag"), likelihood=bl.likelihoods.Categorical(), prior=bl.priors.Normal(0.5)
    )
    fit(start, train, epochs=40, lr=1e-2, lr_schedule="cosine", progress=False)
    fitted = {}
    for structure in structures:
        bnn = bl.bayesianize(
            start.model, bl.Laplace(structure), likelihood=bl.likelihoods.Categorical(), prior=bl.priors.Normal(0.5)
        )
        bnn.fit(train)
        fitted[structure] = bnn
    return fitted


def small_bnn(seed=0, zeros=True):
    model = two_layers(seed, inputs=12, hidden=10)
    if zeros:
        with torch.no_grad():
            model[0].weight[:, ::3] = 0
            model[0].weight[4] = 0
    mean = mean_of(model)
    generator = torch.Generator().manual_seed(seed)
    std = {n: 0.02 + 0.1 * torch.rand(m.shape, generator=generator, dtype=torch.float64) for n, m in mean.items()}
    return given(model, Diagonal(mean, std))


SETTINGS = {
    "posterior": {"bits": 3},
    "nearest": {"bits": 3, "how": "nearest"},
    "unit": {"bits": 3, "per": "unit"},
    "one bit": {"bits": 1},
    "wide": {"bits": 16, "how": "nearest"},
    "k-means": {"bits": 3, "codebook": "kmeans"},
    "budget": {"budget": 3.5},
    "budget by unit": {"budget": 2.5, "per": "unit"},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_values_are_exactly_what_codes_and_grids_say_and_zeros_stay(case):
    bnn = small_bnn()
    before = copy.deepcopy(bnn.state_dict())
    found = bl.quantise(bnn, **SETTINGS[case])
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
    assert set(found.codes) == set(found.grids) == set(mean_of(bnn.model))
    for name, parameter in found.network.named_parameters():
        grid, codes = found.grids[name], found.codes[name]
        assert torch.equal(grid.decode(codes).to(parameter.dtype), parameter)
        assert torch.equal(codes == 0, parameter == 0)
        assert not bool(codes[bnn.model.get_parameter(name) == 0].any())
        if isinstance(grid, Uniform):
            assert bool((codes.abs() <= grid.limit).all())
        else:
            assert int(codes.max()) < len(grid.values) <= 8
        assert torch.equal(grid.numbers, grid.numbers.bfloat16().float())  # two bytes each
    assert type(found.network) is type(bnn.model)


def test_masks_are_zeros_even_where_the_mean_is_not():
    bnn = small_bnn(zeros=False)
    mask = torch.rand(bnn.model[0].weight.shape) < 0.5
    bnn.masks = {"0.weight": mask}
    assert not bool(bl.quantise(bnn, bits=8).codes["0.weight"][~mask].any())


def test_bits_by_selection_and_for_what_the_posterior_does_not_know():
    model = two_layers().float()
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=100)
    found = bl.quantise(bnn, bits={"0": 2, nn.Linear: 5})
    assert found.bits == {"0.weight": 2, "0.bias": 2, "2.weight": 5, "2.bias": 5}
    assert set(found.losses) == {"0.weight", "2.weight"}
    found = bl.quantise(bnn, bits=3)
    assert found.bits == {"0.weight": 3, "0.bias": 8, "2.weight": 3, "2.bias": 8}
    found = bl.quantise(bnn, bits=3, rest=None)
    assert set(found.codes) == {"0.weight", "2.weight"}
    assert torch.equal(found.network.get_parameter("0.bias"), model[0].bias)
    assert set(bl.quantise(bnn, budget=3.0, rest=5).bits.values()) >= {5}


def test_a_budget_loses_no_more_than_the_same_width_everywhere():
    bnn = small_bnn()
    for per in ("layer", "unit"):
        even = bl.quantise(bnn, bits=3, strength=0.0, per=per)
        spent = bl.quantise(bnn, budget=3.0, strength=0.0, per=per)
        kept = sum(spent.kept.values())
        bits = sum(
            float((grid.bits.expand(codes.shape)[bnn.model.get_parameter(name) != 0]).sum())
            for (name, codes), grid in zip(spent.codes.items(), spent.grids.values(), strict=True)
        )
        assert bits <= 3 * kept
        assert spent.expected_loss <= even.expected_loss + 1e-9


def test_sharper_layers_get_more_bits():
    model = two_layers(inputs=10, hidden=10, outputs=10)
    mean = mean_of(model)
    sharp = Diagonal(mean, {n: torch.full_like(m, 0.001 if n.startswith("2") else 0.1) for n, m in mean.items()})
    bits = bl.quantise(given(model, sharp), budget=4.0).bits
    assert bits["2.weight"] > bits["0.weight"] + 2


def test_the_message_gets_shorter_and_the_loss_larger_with_strength():
    bnn = small_bnn(zeros=False)
    found = [bl.quantise(bnn, bits=4, strength=strength) for strength in (0.0, 0.05, 0.5)]
    sizes, losses = [f.coded_bytes for f in found], [f.expected_loss for f in found]
    assert sizes[0] > sizes[1] > sizes[2]
    assert losses[0] <= losses[1] < losses[2]


def test_the_expected_loss_is_what_the_network_loses(laplace, digits):
    """Of the negative log-posterior, which is what a Laplace posterior expands; its exact Hessian is nearly the GGN."""
    data, _, _ = digits
    x, y = data.train_x.flatten(1), data.train_y

    def negative_log_posterior(network):
        with torch.no_grad():
            nll = nn.functional.cross_entropy(network.double()(x.double()), y, reduction="sum")
            return float(nll + sum(p.square().sum() for p in network.parameters()) / (2 * 0.5**2))

    for structure, bits in (("full", 6), ("kron", 5)):
        bnn = laplace[structure]
        before = negative_log_posterior(bnn.mean_network())
        rises, expected = [], []
        for strength in (0.0, 0.003):
            for move in ("joint", None):
                found = bl.quantise(bnn, bits=bits, strength=strength, move=move)
                rises.append(negative_log_posterior(copy.deepcopy(found.network)) - before)
                expected.append(found.expected_loss)
        assert sum(rises) == pytest.approx(sum(expected), rel=0.5)
        assert torch.corrcoef(torch.tensor([rises, expected]))[0, 1] > 0.9


def test_moving_helps_the_network_itself(laplace, digits):
    """On average: three bits are coarse, and a single network gains between a seventh and three quarters."""
    data, _, _ = digits
    x, y = data.train_x.flatten(1), data.train_y

    def nll(network):
        with torch.no_grad():
            return float(nn.functional.cross_entropy(network(x), y, reduction="sum"))

    cases = (("full", "joint"), ("full", None), ("kron", "joint"), ("kron", "row"), ("kron", None))
    rise = dict.fromkeys(cases, 0.0)
    for posteriors in (laplace, trained(digits, ("kron", "full"), seed=1)):
        before = nll(posteriors["kron"].mean_network())
        for structure, move in cases:
            found = bl.quantise(posteriors[structure], bits=3, strength=0.0, move=move)
            rise[structure, move] += nll(found.network) - before
    assert rise["full", "joint"] < 0.75 * rise["full", None]
    assert rise["kron", "joint"] < 0.8 * rise["kron", None]
    assert rise["kron", "row"] < 0.9 * rise["kron", None]


def test_the_whole_file_stays_within_a_budget_of_bytes(laplace, tmp_path):
    """Header and statistics of batch norms too, of which nothing is rounded."""
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    own = bl.bayesianize(normed, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=100)
    for bnn, most, options in ((laplace["diag"], 300, {"bits": 5}), (small_bnn(), 130, {}), (own, 125, {})):
        fits = bl.quantise(bnn, budget=bl.Budget(bytes=most), **options)
        assert 0.7 * most < bl.encode(fits, tmp_path / "file").bytes <= most


def test_searches_on_data_and_bytes(laplace, digits):
    _, _, valid = digits
    bnn = laplace["diag"]
    before, percent = error_of(bnn.mean_network(), bnn.likelihood, valid)
    assert percent
    narrow = bl.quantise(bnn, validate=valid, max_error_increase=1.0)
    assert error_of(narrow.network, bnn.likelihood, valid)[0] <= before + 1.0 + 1e-9
    assert max(narrow.bits.values()) <= 8
    assert narrow.coded_bytes < bl.quantise(bnn, bits=8, how="nearest").coded_bytes / 1.5
    cheap = bl.quantise(bnn, bits=5, validate=valid, max_error_increase=1.0)
    assert error_of(cheap.network, bnn.likelihood, valid)[0] <= before + 1.0 + 1e-9
    assert cheap.coded_bytes < bl.quantise(bnn, bits=5, strength=0.001).coded_bytes
    with pytest.raises(ValueError, match=r"impossible: the least is [\d,]+"):
        bl.quantise(small_bnn(), budget=bl.Budget(bytes=5))
    with pytest.raises(ValueError, match="impossible: the validation error rises"):
        bl.quantise(bnn, bits=1, validate=valid, max_error_increase=0.0)


def test_regression_errors_are_relative():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    bnn = bl.bayesianize(model, Given(), likelihood=bl.likelihoods.Gaussian(0.1), num_data=50)
    bnn.state["posterior"] = Diagonal(mean_of(model), {n: torch.full_like(m, 0.01) for n, m in mean_of(model).items()})
    x = torch.randn(50, 3)
    y = model(x).detach() + 0.1 * torch.randn(50, 1)
    found = bl.quantise(bnn, validate=[(x, y)], max_error_increase=5.0)
    with torch.no_grad():
        before, after = (float((network(x) - y).square().mean().sqrt()) for network in (model, found.network))
    assert after <= 1.05 * before + 1e-6
    assert max(found.bits.values()) < 8


def test_the_size_is_the_entropy_of_the_codes_and_the_numbers_of_the_grid():
    found = bl.quantise(small_bnn(), bits=3, how="nearest")
    codes = found.codes["0.weight"].flatten().tolist()
    shares = [codes.count(code) / len(codes) for code in set(codes)]
    entropy = -sum(share * torch.tensor(share).log2() for share in shares) * len(codes)
    assert found.coded_bits["0.weight"] == pytest.approx(float(entropy) + 16, rel=1e-5)
    shown = repr(found)
    assert "0.weight" in shown
    assert f"{found.nonzeros:,} of" in shown
    assert "nats" in shown


def test_half_precision_networks_stay_so():
    model = two_layers().bfloat16()
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=100)
    found = bl.quantise(bnn, bits=4)
    for name, p in found.network.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(found.grids[name].decode(found.codes[name]).bfloat16(), p)


def test_pruned_and_compacted_networks():
    x = torch.randn(4, 12).double()
    bnn = given(two_layers(inputs=12, hidden=10), kronecker(two_layers(inputs=12, hidden=10)))
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    found = bl.quantise(pruned, bits=4)
    assert found.nonzeros <= sum(int(p.count_nonzero()) for p in pruned.mean_network().parameters())
    for name, mask in pruned.masks.items():
        assert not bool(found.codes[name][~mask].any())
    slim = bl.compact(found.network, example=x)
    assert torch.allclose(slim(x), found.network(x))


def test_what_is_refused():
    bnn = small_bnn()
    model = two_layers().float()
    loader = [(torch.randn(4, 12).double(), torch.zeros(4, dtype=torch.int64))]
    laplace = bl.bayesianize(model, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    for error, words, arguments in (
        (TypeError, "needs a Bayesian", (model, {})),
        (NotFitted, "fit", (laplace, {})),
        (ValueError, "from 1 to 16. Got 0", (bnn, {"bits": 0})),
        (ValueError, "from 1 to 16. Got 17", (bnn, {"bits": {"all": 17}})),
        (TypeError, "whole number. Got 2.5", (bnn, {"bits": 2.5})),
        (NoSiteMatched, 'Closest names: "0.weight"', (bnn, {"bits": {"0.wieght": 3, "all": 4}})),
        (NoSiteMatched, 'No bits were given for "2.weight"', (bnn, {"bits": {"0": 3}})),
        (ValueError, "0.5 bits per weight is impossible: the least is 1", (bnn, {"budget": 0.5})),
        (ValueError, "leave one of them out", (bnn, {"budget": 3.0, "bits": 3})),
        (ValueError, "mean bits per weight or Budget", (bnn, {"budget": bl.Budget(sparsity=0.5)})),
        (TypeError, "must be a number", (bnn, {"budget": "3"})),
        (ValueError, "positive", (bnn, {"budget": -1.0})),
        (ValueError, "two goals", (bnn, {"budget": 3.0, "max_error_increase": 1.0, "validate": loader})),
        (ValueError, "pass validate", (bnn, {"max_error_increase": 1.0})),
        (ValueError, "at least 0", (bnn, {"max_error_increase": -1.0, "validate": loader})),
        (bl.errors.BayeslimError, "not an iterator", (bnn, {"max_error_increase": 1.0, "validate": iter(loader)})),
        (bl.errors.BayeslimError, "no batches", (bnn, {"max_error_increase": 1.0, "validate": []})),
        (ValueError, "varies the strength", (bnn, {"bits": 3, "how": "nearest", "budget": bl.Budget(bytes=100)})),
        (ValueError, "how must be one of", (bnn, {"how": "up"})),
        (ValueError, "per must be one of", (bnn, {"per": "channel"})),
        (ValueError, "move must be one of", (bnn, {"move": "all"})),
        (ValueError, "codebook must be one of", (bnn, {"codebook": "huffman"})),
        (ValueError, 'per="layer"', (bnn, {"codebook": "kmeans", "per": "unit"})),
        (ValueError, "SoftSharing", (bnn, {"codebook": "prior"})),
        (ValueError, "strength", (bnn, {"strength": -0.1})),
        (ValueError, "finite", (bnn, {"strength": float("inf")})),
        (ValueError, "at least 1", (bnn, {"steps": 0})),
        (ValueError, "from 1 to 16", (bnn, {"rest": 0})),
    ):
        with pytest.raises(error, match=words):
            bl.quantise(arguments[0], **arguments[1])
    correlated = given(two_layers(), diagonal(two_layers()))
    assert bl.quantise(correlated, move="row").codes  # nothing moves, so rows or not is the same
    full = given(two_layers(), bl.posteriors.LowRank(mean_of(two_layers()), torch.ones(57, 1).double(), torch.ones(1)))
    with pytest.raises(ValueError, match="needs a Kronecker posterior"):
        bl.quantise(full, move="row")


def test_several_networks_are_refused():
    model = two_layers()
    particles = Particles({n: torch.stack([m, m]) for n, m in mean_of(model).items()})
    with pytest.raises(TypeError, match="Distil"):
        bl.quantise(given(model, particles))


def test_an_emptied_layer_is_said():
    model = small_bnn().model
    with torch.no_grad():
        model[0].weight[:, 2:] = 0  # so that zero is the usual code
    vague = Diagonal(
        mean_of(model), {n: torch.full_like(m, 50.0 if n == "0.weight" else 0.01) for n, m in mean_of(model).items()}
    )
    with pytest.warns(BayeslimWarning, match='All of "0.weight" was rounded to zero'):
        bl.quantise(given(model, vague), bits=3, strength=1.0)


def test_codebooks_are_of_both_kinds():
    found = bl.quantise(small_bnn(), bits=3, codebook="kmeans")
    assert all(isinstance(found.grids[name], Codebook) for name in ("0.weight", "2.weight"))
    assert "codebook" in repr(found)
