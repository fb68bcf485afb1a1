"""A slim network that keeps the posterior of what is left."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from networks import LeNet5, prepared
from torch import nn

import bayeslim as bl
from bayeslim.app.data import Loader
from bayeslim.compact.restricted import NotRestrictable, restricted
from bayeslim.errors import UnsupportedModel
from bayeslim.posteriors import Conditioned, Dense, Diagonal, Kronecker, LowRank
from bayeslim.predict.linearised import output_gaussians
from bayeslim.prune import Plan

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(48, 1, 8, 8, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 4, (48,), generator=GENERATOR)
ROWS = IMAGES.flatten(1)[:, :6].contiguous()


def convolutional(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32, 10), nn.Tanh(), nn.Linear(10, 4),
    ).double()  # fmt: skip
    model(IMAGES)  # statistics for the norm
    return model.eval()


def plain(seed=0, hidden=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.Sigmoid(), nn.Linear(hidden, 5), nn.ReLU(), nn.Linear(5, 4)).double()


def fitted(model, method, data=IMAGES, prior=None, **options):
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical(), num_data=48, prior=prior)
    bnn.fit(loader(data), seed=0, **options)
    return bnn.eval()


def loader(data=IMAGES):
    return Loader(data, LABELS, batch_size=24)


def by_units(bnn, sparsity=0.5, example=IMAGES[:3]):
    budget = bl.Budget(sparsity=sparsity, empty_layers="keep best")
    return bl.prune(bnn, budget, granularity="unit", example=example)


def variances(bnn, x):
    return torch.cat([covariance.detach() for _, covariance in output_gaussians(bnn.model, bnn.posterior_, [x])])


def answers(network, x):
    with torch.no_grad():
        return network.eval()(x)


METHODS = {"laplace": bl.Laplace(), "variational": bl.Variational()}


@functools.cache
def fitted_images(name):
    """A fitted convolutional network, made once: nothing changes it."""
    return fitted(convolutional(), METHODS[name], epochs=1, lr=1e-3)


@functools.cache
def cut_images(name):
    """The same network cut by units."""
    return by_units(fitted_images(name))


@functools.cache
def slim_images(name):
    """The same network compacted, made once; tests that change it take a copy."""
    return bl.compact(cut_images(name), IMAGES[:3], bayesian=True)


LAPLACES = {
    "kron": (bl.Laplace(), Kronecker),
    "diag": (bl.Laplace(structure="diag"), Kronecker),
    "low rank": (bl.Laplace(structure="lowrank", rank=12), LowRank),
    "full last layer": (bl.Laplace(structure="full", subset="last-layer"), Dense),
    "subnetwork": (bl.Laplace(subset=bl.Subnetwork(size=40, by="random")), Dense),
}


def assert_same_predictions(slim, pruned, x):
    assert isinstance(slim, bl.Bayesian)
    assert slim.masks == {}
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in pruned.parameters())
    torch.testing.assert_close(answers(slim, x), answers(pruned, x))
    torch.testing.assert_close(variances(slim, x[:4]), variances(pruned, x[:4]), rtol=1e-4, atol=1e-7)
    bl.predict(slim, x)  # in closed form, at the network's own weights


@pytest.mark.parametrize("name", LAPLACES)
def test_a_cut_by_units_predicts_the_same_variances(name):
    method, kind = LAPLACES[name]
    pruned = by_units(fitted(plain(), method, ROWS), 0.4, ROWS[:3])
    slim = bl.compact(pruned, ROWS[:3], bayesian=True)
    assert type(slim.posterior_) is kind  # nothing is left that would have to be conditioned on
    assert_same_predictions(slim, pruned, ROWS)


def test_a_cut_by_channels_predicts_the_same_variances():
    pruned, slim = cut_images("laplace"), slim_images("laplace")
    assert slim.model[7].weight.shape < pruned.model[7].weight.shape
    assert_same_predictions(slim, pruned, IMAGES)
    assert torch.equal(answers(slim, IMAGES), answers(bl.compact(pruned, IMAGES[:3]), IMAGES))


def test_a_cut_by_weights_keeps_its_zeros_and_its_variances():
    """Outgoing weights of two units and some others: the two go, the others stay as zeros."""
    bnn = fitted(plain(), bl.Laplace(curvature="exact"), ROWS, epochs=20, lr=0.02)
    masks = {"2.weight": torch.rand(5, 8, generator=torch.Generator().manual_seed(1)) < 0.7}
    masks["2.weight"][:, [1, 4]] = False
    cut = {n: bnn.model.get_parameter(n).clone().bool() | True for n in ("0.weight", "0.bias")}
    cut["0.weight"][[1, 4]], cut["0.bias"][[1, 4]] = False, False
    pruned = bl.prune(bnn, Plan(masks | cut))
    slim = bl.compact(pruned, ROWS[:3], bayesian=True)
    posterior = slim.posterior_
    assert isinstance(posterior, Conditioned)
    stay = [0, 2, 3, 5, 6, 7]
    assert torch.equal(slim.masks["2.weight"], masks["2.weight"][:, stay])
    assert slim.masks.keys() == {"2.weight"}
    torch.testing.assert_close(variances(slim, ROWS[:4]), variances(pruned, ROWS[:4]), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(posterior.variance["2.weight"], pruned.posterior_.variance["2.weight"][:, stay])
    more = {"2.weight": slim.masks["2.weight"] & (torch.rand(5, 6) < 0.7)}
    whole = torch.zeros(5, 8, dtype=torch.bool)
    whole[:, stay] = more["2.weight"]
    again, once = bl.prune(slim, Plan(more)), bl.prune(bnn, Plan({"2.weight": whole} | cut))
    torch.testing.assert_close(again.posterior_.mean["2.weight"], once.posterior_.mean["2.weight"][:, stay])
    torch.testing.assert_close(answers(again, ROWS), answers(once, ROWS), rtol=1e-4, atol=1e-6)  # iterative solves


def test_weights_that_nothing_read_go_without_a_trace_once_the_curvature_is_fresh():
    bnn = fitted(plain(), bl.Laplace(curvature="exact"), ROWS)
    masks = {"2.weight": torch.ones(5, 8, dtype=torch.bool).index_fill_(1, torch.tensor([1, 4]), False)}
    pruned = bl.prune(bnn, Plan(masks), refresh=loader(ROWS))
    slim = bl.compact(pruned, ROWS[:3], bayesian=True)
    assert slim.model[0].weight.shape == (6, 6)
    assert isinstance(slim.posterior_, Kronecker)
    torch.testing.assert_close(variances(slim, ROWS[:4]), variances(pruned, ROWS[:4]), rtol=1e-4, atol=1e-7)
    fresh = copy.deepcopy(slim)
    fresh.fit(loader(ROWS))
    torch.testing.assert_close(variances(slim, ROWS[:4]), variances(fresh, ROWS[:4]), rtol=1e-4, atol=1e-7)


def test_a_constant_moves_the_mean_of_the_next_bias_and_not_its_spread():
    bnn = fitted(plain(), bl.Laplace(curvature="exact"), ROWS)
    masks = {"0.weight": torch.ones(8, 6, dtype=torch.bool).index_fill_(0, torch.tensor([2]), False)}
    pruned = bl.prune(bnn, Plan(masks))
    slim = bl.compact(pruned, ROWS[:3], bayesian=True)
    assert slim.model[0].weight.shape == (7, 6)
    assert not torch.equal(slim.posterior_.mean["2.bias"], pruned.posterior_.mean["2.bias"])
    torch.testing.assert_close(answers(slim, ROWS), answers(pruned, ROWS))
    block, whole = slim.posterior_.blocks[1], pruned.posterior_.base.blocks[1]
    torch.testing.assert_close(block.precision_diagonal[0, :, -1], whole.precision_diagonal[0, :, -1])
    bl.predict(slim, ROWS)


def test_a_constant_in_a_bias_that_was_cut_is_refused():
    bnn = fitted(plain(), bl.Laplace(structure="diag"), ROWS)
    masks = {"0.weight": torch.ones(8, 6, dtype=torch.bool).index_fill_(0, torch.tensor([2]), False)}
    pruned = bl.prune(bnn, Plan(masks | {"2.bias": torch.arange(5) > 0}))
    with pytest.raises(NotRestrictable, match=r'added to "2.bias" at a place that was cut'):
        bl.compact(pruned, ROWS[:3], bayesian=True)
    bl.compact(pruned, ROWS[:3])


def test_independent_weights_keep_their_marginals():
    pruned, slim = cut_images("variational"), copy.deepcopy(slim_images("variational"))
    old, new = pruned.posterior_, slim.posterior_
    assert isinstance(new, Diagonal)
    for name in new.names:
        kept = pruned.masks.get(name, torch.ones_like(old.mean[name], dtype=torch.bool))
        assert torch.equal(new.mean[name].flatten(), old.mean[name][kept])
        assert torch.equal(new.variance[name].flatten(), old.variance[name][kept])
    torch.testing.assert_close(answers(slim, IMAGES), answers(pruned, IMAGES))
    torch.manual_seed(0)
    draws = [bl.predict(bnn, IMAGES, samples=200, how="sample").probs for bnn in (pruned, slim)]
    torch.testing.assert_close(*draws, rtol=0, atol=0.02)
    slim.train()
    assert not torch.equal(slim(IMAGES), slim(IMAGES))
    assert pruned.training is False


FAMILIES = {
    "low rank": bl.Variational(family=bl.families.LowRankGaussian(rank=2)),
    "mixture": bl.Variational(family=bl.families.MixtureOfGaussians(components=2, spread=0.1)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_what_it_says_of_the_weights_that_are_left(name, tmp_path):
    bnn = fitted(plain(), FAMILIES[name], ROWS, epochs=1, lr=1e-3)
    masks = {"2.weight": torch.rand(5, 8, generator=torch.Generator().manual_seed(3)) < 0.7}
    masks["2.weight"][:, [1, 4]] = False
    masks["0.weight"] = torch.arange(8)[:, None].expand(8, 6) != 2  # its bias is folded into the next
    pruned = bl.prune(bnn, Plan(masks))
    random = torch.get_rng_state()
    slim = bl.compact(pruned, ROWS[:3], bayesian=True)
    assert torch.equal(random, torch.get_rng_state())
    assert slim.model[2].weight.shape == (5, 5)
    torch.testing.assert_close(answers(slim, ROWS), answers(pruned, ROWS))
    old, new, stay = pruned.posterior_, slim.posterior_, [0, 3, 5, 6, 7]
    assert type(new) is type(old)
    torch.testing.assert_close(new.variance["2.weight"], old.variance["2.weight"][:, stay])
    torch.testing.assert_close(new.variance["0.weight"], old.variance["0.weight"][stay])
    state = restricted(old, KEPT, new.mean)
    assert all(torch.allclose(state.variance[n], v) for n, v in new.variance.items())
    assert all(torch.allclose(state.mean[n], v) for n, v in new.mean.items())
    bl.save(slim, tmp_path)
    assert torch.equal(answers(bl.load(tmp_path, model=plain(seed=1)), ROWS), answers(slim, ROWS))
    slim.fit(loader(ROWS), epochs=1, lr=1e-3)
    assert not bool(slim.model[2].weight[~masks["2.weight"][:, stay]].any())


KEPT = {name: {dim: torch.tensor([0, 3, 5, 6, 7])} for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1))}


def test_learned_priors_go_on_from_where_they_are():
    shared = bl.priors.Normal(0.7, learn=True)
    rows = bl.priors.Normal(torch.linspace(0.5, 1.5, 8, dtype=torch.float64)[:, None], learn=True)
    bnn = fitted(plain(), bl.Variational(), ROWS, {"0.weight": rows, "all": shared}, epochs=2, lr=0.05)
    pruned = by_units(bnn, 0.4, ROWS[:3])
    slim = bl.compact(pruned, ROWS[:3], bayesian=True)
    assert len(slim.hyperparameters) == 2
    kept = pruned.masks["0.bias"]
    torch.testing.assert_close(slim.priors["0.weight"].std, pruned.priors["0.weight"].std[kept])
    assert slim.priors["2.weight"].std != shared.std
    torch.testing.assert_close(slim.priors["2.weight"].std, pruned.priors["2.weight"].std)
    assert slim.priors.given["2.weight"] is slim.priors.given["4.weight"]
    before = slim.priors["2.weight"].std.item()
    slim.fit(loader(ROWS), epochs=1, lr=0.05)
    assert slim.priors["2.weight"].std.item() != before
    best = bl.compact(
        by_units(fitted(plain(), bl.Variational(), ROWS, bl.priors.Normal(1.0, learn="closed form")), 0.4, ROWS[:3]),
        ROWS[:3],
        bayesian=True,
    )
    squares = [(m.square() + best.posterior_.variance[n]).flatten() for n, m in best.posterior_.mean.items()]
    torch.testing.assert_close(best.priors["0.weight"].std.square(), torch.cat(squares).mean())


def test_learned_settings_of_single_weights_that_several_share_are_refused():
    columns = bl.priors.Normal(torch.linspace(0.5, 1.5, 8, dtype=torch.float64), learn=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    prior = {"2.weight": columns, "4.weight": columns, "all": bl.priors.Normal(1.0)}
    pruned = by_units(fitted(model, bl.Variational(), ROWS, prior), 0.5, ROWS[:3])
    with pytest.raises(NotRestrictable, match=r"prior that 2\.weight, 4\.weight share"):
        bl.compact(pruned, ROWS[:3], bayesian=True)


@pytest.mark.parametrize("name", ["resnext", "tied_embeddings"])
def test_any_architecture_whose_modules_take_the_new_sizes(name):
    (model, example), graph = prepared(name)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), sites="all", num_data=9)
    with torch.no_grad():
        for site in bnn.sites.names:
            bnn.model.get_parameter(f"{site}_log_std").uniform_(-4, -2)
    cut = torch.randperm(len(graph.units), generator=torch.Generator().manual_seed(0))[: len(graph.units) // 2]
    pruned = bl.prune(bnn, Plan(graph.masks(cut.tolist())))
    old, new = pruned.posterior_.variance, bl.compact(pruned, example, bayesian=True).posterior_.variance
    for site, mask in pruned.masks.items():
        assert torch.equal(new[site].flatten(), old[site][mask])
    assert sum(v.numel() for v in new.values()) == sum(int((v > 0).sum()) for v in old.values())


def test_it_trains_with_the_zeros_that_are_left():
    bnn = fitted(plain(), bl.Variational(), ROWS, epochs=2, lr=0.01)
    masks = {"2.weight": torch.rand(5, 8, generator=torch.Generator().manual_seed(3)) < 0.5}
    masks["2.weight"][:, [1, 4]] = False
    slim = bl.compact(bl.prune(bnn, Plan(masks)), ROWS[:3], bayesian=True)
    assert slim.step == bnn.step
    before = slim.model[2].weight.detach().clone()
    slim.fit(loader(ROWS), epochs=2, lr=0.01)
    kept = slim.masks["2.weight"]
    assert kept.shape == (5, 6)
    assert not bool(slim.model[2].weight[~kept].any())
    assert not bool(slim.posterior_.std["2.weight"][~kept].any())
    assert not torch.equal(before[kept], slim.model[2].weight[kept])
    laplace = fitted(plain(), bl.Laplace(), ROWS)
    slim = bl.compact(bl.prune(laplace, Plan(masks)), ROWS[:3], bayesian=True)
    slim.fit(loader(ROWS), epochs=2, lr=0.01)
    assert not bool(slim.model[2].weight[~kept].any())
    assert isinstance(slim.posterior_, Conditioned)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("granularity", ["unit", "weight"])
def test_saved_and_loaded_with_the_original_architecture(method, granularity, tmp_path):
    slim = slim_images(method)
    if granularity == "weight":
        pruned = bl.prune(fitted_images(method), bl.Budget(sparsity=0.8))
        slim = bl.compact(pruned, IMAGES[:3], bayesian=True)
    bl.save(slim, tmp_path)
    again = bl.load(tmp_path, model=convolutional(seed=1))
    assert torch.equal(answers(again, IMAGES), answers(slim, IMAGES))
    assert all(torch.equal(again.posterior_.variance[n], v) for n, v in slim.posterior_.variance.items())
    assert again.masks.keys() == slim.masks.keys()
    again.fit(loader(), epochs=1, lr=1e-3)
    bl.save(again, tmp_path)
    twice = bl.load(tmp_path, model=convolutional(seed=2))
    assert torch.equal(answers(twice, IMAGES), answers(again, IMAGES))


def test_a_network_of_the_zoo_needs_no_model_to_load(tmp_path):
    rows = ROWS.float()
    pruned = by_units(fitted(bl.zoo.create("mlp", inputs=6, hidden=8, classes=4), bl.Laplace(), rows), example=rows[:3])
    slim = bl.compact(pruned, rows[:3], bayesian=True)
    bl.save(slim, tmp_path)
    again = bl.load(tmp_path)
    assert again.model.fc2.weight.shape == slim.model.fc2.weight.shape < pruned.model.fc2.weight.shape
    assert torch.equal(answers(again, rows), answers(slim, rows))
    assert torch.equal(variances(again, rows), variances(slim, rows))


@pytest.mark.parametrize("method", METHODS)
def test_pruned_and_compacted_again(method):
    pruned, slim = cut_images(method), slim_images(method)
    more = by_units(slim, 0.3)
    slimmer = bl.compact(more, IMAGES[:3], bayesian=True)
    sizes = [sum(p.numel() for p in bnn.model.parameters()) for bnn in (pruned, slim, slimmer)]
    assert sizes[0] > sizes[1] > sizes[2]
    torch.testing.assert_close(answers(slimmer, IMAGES), answers(more, IMAGES))
    plain_again = bl.compact(slimmer, IMAGES[:3])
    assert all(type(m).__module__.startswith("torch") for m in plain_again.modules())
    assert {n for n, _ in plain_again.named_parameters()} == {n for n, _ in convolutional().named_parameters()}


def test_priors_of_single_weights_are_cut_with_them():
    std = torch.rand(8, 6, dtype=torch.float64) + 0.5
    prior = {"0.weight": bl.priors.Normal(std, torch.rand(6, dtype=torch.float64)), "all": bl.priors.Normal(2.0)}
    pruned = by_units(fitted(plain(), bl.Variational(), ROWS, prior, epochs=1), 0.4, ROWS[:3])
    slim = bl.compact(pruned, ROWS[:3], bayesian=True)
    rows = pruned.masks["0.bias"]
    assert torch.equal(slim.priors["0.weight"].std, std[rows])
    assert torch.equal(slim.priors["0.weight"].mean, prior["0.weight"].mean)
    assert slim.priors["2.weight"] == prior["all"]
    slim.fit(loader(ROWS), epochs=1)
    laplace = by_units(fitted(plain(), bl.Laplace(structure="diag"), ROWS, prior), 0.4, ROWS[:3])
    small = bl.compact(laplace, ROWS[:3], bayesian=True)
    torch.testing.assert_close(variances(small, ROWS[:3]), variances(laplace, ROWS[:3]))


def test_what_is_remembered_for_learning_on_is_cut_too():
    bnn = fitted(plain(), bl.Laplace(), ROWS)
    bnn = bl.continual.update(bnn, loader(ROWS), epochs=1, lr=1e-3, centre="product")
    slim = bl.compact(by_units(bnn.eval(), 0.4, ROWS[:3]), ROWS[:3], bayesian=True)
    assert slim.state["anchor"].mean["0.weight"].shape == slim.model[0].weight.shape
    bl.continual.update(slim, loader(ROWS), epochs=1, lr=1e-3, centre="product")


def test_the_pruned_network_is_left_alone():
    pruned = cut_images("variational")
    before = copy.deepcopy(pruned.state_dict())
    slim = bl.compact(pruned, IMAGES[:3], bayesian=True)
    with torch.no_grad():
        for p in slim.parameters():
            p.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in pruned.state_dict().items())
    assert slim.likelihood is not pruned.likelihood


def test_what_cannot_stay_bayesian_is_refused():
    model, x = LeNet5().double(), torch.randn(48, 1, 14, 14, dtype=torch.float64)
    pruned = by_units(fitted(model, bl.Laplace(), x), example=x[:3])
    with pytest.raises(UnsupportedModel, match=r"rewritten graph, since the network's own modules rely on the old"):
        bl.compact(pruned, x[:3], bayesian=True)
    with pytest.raises(TypeError, match=r"a LeNet5 has none"):
        bl.compact(model, x[:3], bayesian=True)
    damped = by_units(fitted(plain(), bl.Laplace(damping="sqrt"), ROWS), example=ROWS[:3])
    with pytest.raises(NotRestrictable, match=r'damping="sqrt"'):
        bl.compact(damped, ROWS[:3], bayesian=True)


@pytest.mark.parametrize(
    ("per", "rate", "make", "data"),
    [
        ("weight", {"learn": False}, plain, ROWS),
        ("unit", {}, convolutional, IMAGES),
        ("layer", {"largest": 2.0}, plain, ROWS),
    ],
)
def test_rates_of_dropout_are_cut_with_what_shares_them(per, rate, make, data):
    method = bl.Variational(bl.families.DropoutGaussian(per=per, **rate))
    pruned = fitted(make(), method, data, prior=bl.priors.LogUniform(), epochs=2, lr=1e-2)
    budget = bl.Budget(sparsity=0.5, empty_layers="keep best")
    pruned = bl.prune(pruned, budget, granularity="unit", criterion="magnitude", example=data[:3])
    slim = bl.compact(pruned, data[:3], bayesian=True)
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in pruned.parameters())
    kept = pruned.posterior_
    for name, std in slim.posterior_.std.items():
        left = kept.std[name][kept.mean[name] != 0]
        assert torch.equal(std[slim.posterior_.mean[name] != 0].sort().values, left.sort().values), name
    slim.fit(loader(data), epochs=1)
