import copy

import pytest
import torch
from given_posteriors import FAMILIES, Given, covariance_of, dense, diagonal, flat, given, kronecker, two_layers
from torch import nn

import bayeslim as bl
from bayeslim.app.data import Loader
from bayeslim.errors import ShapeMismatch
from bayeslim.posteriors import Conditioned
from bayeslim.prune import EmptyLayer, NothingToCut, Plan, settings
from bayeslim.prune.search import validation_error

EXAMPLE = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def classes(n=120, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def loader(n=120, seed=0, batch=40):
    return Loader(*classes(n, seed), batch_size=batch)


def variational(seed=0, hidden=6):
    method = bl.Variational(bl.families.DiagonalGaussian(initial_std=0.01))  # few units are of no use to it
    bnn = bl.bayesianize(two_layers(seed, hidden=hidden), method, likelihood=bl.likelihoods.Categorical(), num_data=120)
    bnn.fit(loader(), epochs=15, lr=0.03, seed=0)
    return bnn.eval()


@pytest.fixture(scope="module")
def fitted():
    return variational()


@pytest.fixture(scope="module")
def laplace():
    torch.manual_seed(0)
    bnn = bl.bayesianize(
        two_layers(), bl.Laplace(curvature="exact"), likelihood=bl.likelihoods.Categorical(), num_data=120
    )
    bnn.fit(loader(), epochs=30, lr=0.03, seed=0)
    return bnn.eval()


def dense_answer(posterior, kept):
    """E[w | w_S = 0] from the whole covariance."""
    sigma, mean = covariance_of(posterior), flat(posterior.mean)
    keep = flat(kept)
    cut = ~keep
    moved = torch.zeros_like(mean)
    moved[keep] = mean[keep] - sigma[keep][:, cut] @ torch.linalg.solve(sigma[cut][:, cut], mean[cut])
    return moved


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_is_conditioning(family):
    model = two_layers()
    bnn = given(model, FAMILIES[family](model))
    before = copy.deepcopy(bnn.posterior_.mean)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.4))
    pruned = bl.prune(bnn, plan)
    kept = {n: plan.masks.get(n, torch.ones_like(m, dtype=torch.bool)) for n, m in before.items()}
    expected = dense_answer(bnn.posterior_, kept)
    torch.testing.assert_close(flat(pruned.posterior_.mean), expected, rtol=1e-4, atol=1e-5)
    network = {n: p.detach() for n, p in pruned.mean_network().named_parameters()}
    assert same(network, pruned.posterior_.mean)
    assert all(not bool(network[n][~m].any()) for n, m in plan.masks.items())
    moved = float((network["0.weight"] - before["0.weight"])[kept["0.weight"]].abs().max())
    assert (moved == 0) == (family == "diagonal")
    assert same(bnn.posterior_.mean, before)
    assert bnn.masks == {}
    assert bnn.plan_ is None
    assert pruned.plan_ == plan
    assert same(pruned.masks, {n: m for n, m in plan.masks.items() if not bool(m.all())})


def test_a_unit_is_made_up_for_where_it_was_read_and_not_where_it_was_made():
    """The rows that made it go for nothing; the survivors of the layer that read it move."""
    model = two_layers()
    bnn = given(model, kronecker(model))
    before = copy.deepcopy(bnn.posterior_.mean)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.3), granularity="unit", example=EXAMPLE)
    pruned = bl.prune(bnn, plan)
    after, kept = pruned.posterior_.mean, plan.masks
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * kept["0.weight"])
    torch.testing.assert_close(after["0.bias"], before["0.bias"] * kept["0.bias"])
    assert float((after["2.weight"] - before["2.weight"])[kept["2.weight"]].abs().max()) > 1e-3
    readers = {n: kept[n] if n == "2.weight" else torch.ones_like(m, dtype=torch.bool) for n, m in before.items()}
    expected = dense_answer(bnn.posterior_, readers)[
        flat({n: torch.full_like(m, n[0] == "2") for n, m in before.items()}).bool()
    ]
    torch.testing.assert_close(
        torch.cat([after["2.weight"].flatten(), after["2.bias"]]), expected, rtol=1e-4, atol=1e-5
    )
    again = bl.prune(pruned, bl.Budget(sparsity=0.6), granularity="unit", example=EXAMPLE)
    torch.testing.assert_close(again.posterior_.mean["0.weight"], before["0.weight"] * again.masks["0.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_by_units_compacts_exactly(family):
    model = two_layers(hidden=12)
    pruned = bl.prune(
        given(model, FAMILIES[family](model)), bl.Budget(sparsity=0.5), granularity="unit", example=EXAMPLE
    )
    slim = bl.compact(pruned, EXAMPLE)
    left = int(pruned.masks["0.bias"].sum())
    assert left < 12
    assert slim[0].out_features == slim[2].in_features == left
    torch.testing.assert_close(slim(EXAMPLE), pruned(EXAMPLE))
    torch.testing.assert_close(bl.compact(pruned.mean_network(), EXAMPLE)(EXAMPLE), slim(EXAMPLE))


def networks():
    torch.manual_seed(0)
    yield (
        nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 4),
        ),
        torch.randn(2, 1, 8, 8),
    )
    yield _Recurrent(), torch.randn(2, 6, 3)


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("place", [0, 1])
def test_channels_and_recurrent_units_go_with_their_biases_and_norms(place):
    model, x = list(networks())[place]
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=10).eval()
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), granularity="unit", example=x)
    points = set(pruned.masks) - set(pruned.posterior_.names)
    assert points  # biases and norms have no posterior, and go too
    assert all(not bool(pruned.mean_network().get_parameter(n)[~pruned.masks[n]].any()) for n in points)
    slim = bl.compact(pruned, x)
    total = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in slim.parameters()) == total - sum(int((~m).sum()) for m in pruned.masks.values())
    torch.testing.assert_close(slim(x), pruned(x), rtol=1e-4, atol=1e-5)


def test_rows_are_an_approximation_on_request():
    model = two_layers()
    bnn = given(model, kronecker(model))
    plan = bl.plan(bnn, bl.Budget(sparsity=0.4))
    joint, rows = (bl.prune(bnn, plan, how=how).posterior_.mean["0.weight"] for how in ("joint", "row"))
    assert float((joint - rows).abs().max()) > 1e-3
    assert same(bl.prune(given(model, diagonal(model)), plan, how="row").masks, bl.prune(bnn, plan).masks)
    with pytest.raises(ValueError, match="Kronecker"):
        bl.prune(given(model, dense(model)), plan, how="row")
    with pytest.raises(ValueError, match="how"):
        bl.prune(bnn, plan, how="columns")


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_twice_is_pruning_once_with_both(family):
    model = two_layers()
    bnn = given(model, FAMILIES[family](model))
    first = bl.plan(bnn, bl.Budget(sparsity=0.3))
    once = bl.prune(bnn, first)
    twice = bl.prune(once, bl.Budget(sparsity=0.6))
    assert sum(int((~m).sum()) for m in twice.masks.values()) == round(0.6 * 48)
    assert all(not bool((twice.masks[n] & ~m).any()) for n, m in once.masks.items())
    both = bl.prune(bnn, first.merge(twice.plan_))
    assert same(both.masks, twice.masks)
    torch.testing.assert_close(flat(both.posterior_.mean), flat(twice.posterior_.mean), rtol=1e-4, atol=1e-5)
    other = Plan({"0.weight": torch.rand(6, 5) < 0.5})
    crossed = bl.prune(once, other)
    assert torch.equal(crossed.masks["0.weight"], once.masks["0.weight"] & other.masks["0.weight"])


def test_the_plan_of_a_network_that_was_cut_before_tells_all_that_is_gone(fitted, tmp_path):
    once = bl.prune(fitted, bl.Budget(sparsity=0.5))
    by_hand = Plan({"2.weight": torch.arange(6).expand(3, 6) > 0, "0.bias": torch.arange(6) > 0})
    twice = bl.prune(once, by_hand)
    told = twice.plan_
    assert same({name: mask for name, mask in told.masks.items() if not bool(mask.all())}, twice.masks)
    weights = [p for p in twice.mean_network().parameters() if p.ndim > 1]
    assert told.sparsity == sum(int((w == 0).sum()) for w in weights) / 48
    assert told.criterion == f"{once.plan_.criterion} + by hand"
    assert f"{100 * told.sparsity:.2f} % of the weights go" in str(told)
    assert same(bl.prune(fitted, told).masks, twice.masks)
    bl.save(twice, tmp_path)
    assert bl.load(tmp_path, model=two_layers(seed=1)).plan_ == told
    assert bl.prune(twice, bl.Budget(sparsity=0.9)).plan_.sparsity == pytest.approx(0.9, abs=0.5 / 48)


def test_the_plan_of_a_cut_in_steps_has_its_words_once(fitted):
    units = bl.prune(fitted, bl.Budget(sparsity=0.3), granularity="unit", criterion="magnitude", example=EXAMPLE)
    told = bl.prune(units, bl.Budget(sparsity=0.7), criterion="snr", steps=3).plan_
    assert (told.criterion, told.granularity) == ("magnitude + snr", "unit + weight")
    assert told.budget == "Budget(sparsity=0.3) + Budget(sparsity=0.7)"
    assert same(told.unread, units.plan_.unread)
    assert not bool((told.masks["0.bias"] & ~units.masks["0.bias"]).any())


def test_a_pruned_network_predicts_and_trains_with_its_zeros(fitted):
    pruned = bl.prune(fitted, bl.Budget(sparsity=0.5))
    assert bl.predict(pruned, EXAMPLE, samples=4).probs.min() > 0
    assert bl.log_evidence(pruned, loader(), samples=2).value < 0
    weights = {n: p.clone() for n, p in pruned.model.named_parameters()}
    pruned.fit(loader(), epochs=2, lr=0.01, seed=0)
    after = dict(pruned.model.named_parameters())
    assert any(not torch.equal(after[n], w) for n, w in weights.items())
    assert all(not bool(after[n][~m].any()) for n, m in pruned.masks.items())
    assert all(not bool(pruned.posterior_.std[n][~m].any()) for n, m in pruned.masks.items())
    assert all(bool(torch.isfinite(p[pruned.masks[n]]).all()) for n, p in after.items() if n in pruned.masks)


def test_laplace_fine_tunes_and_is_pruned_again(laplace):
    pruned = bl.prune(laplace, bl.Budget(sparsity=0.4))
    assert isinstance(pruned.posterior_, Conditioned)
    assert bl.predict(pruned, EXAMPLE).probs.shape == (4, 3)
    pruned.fit(loader(), epochs=2, lr=0.01, seed=0)
    assert all(not bool(pruned.model.get_parameter(n)[~m].any()) for n, m in pruned.masks.items())
    again = bl.prune(pruned, bl.Budget(sparsity=0.6))
    assert again.plan_.sparsity == pytest.approx(0.6, abs=0.5 / 48)


def test_steps_meet_the_budget_and_refresh_after_each():
    model = two_layers()
    bnn = given(model, kronecker(model))
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.6), steps=4, refresh=loader())
    assert pruned.state["fits"] == 4
    assert sum(int((~m).sum()) for m in pruned.masks.values()) == round(0.6 * 48)
    assert "fits" not in bnn.state
    assert pruned.posterior_.mean["0.weight"][~pruned.masks["0.weight"]].abs().sum() == 0


def test_units_are_found_once_for_all_steps(laplace, monkeypatch):
    calls, find = [], settings.units
    monkeypatch.setattr(settings, "units", lambda *args: calls.append(1) or find(*args))
    pruned = bl.prune(laplace, bl.Budget(sparsity=0.6), steps=3, granularity="unit", example=EXAMPLE, refresh=loader())
    assert len(calls) == 1
    assert pruned.plan_.sparsity == pytest.approx(0.6, abs=0.1)
    bl.prune(pruned, bl.Budget(sparsity=0.7), granularity="unit", example=EXAMPLE)
    assert len(calls) == 2, "another call may have another network"


def test_more_steps_than_items_are_fine(fitted):
    pruned = bl.prune(fitted, bl.Budget(sparsity=0.04), steps=5)
    assert sum(int((~m).sum()) for m in pruned.masks.values()) == 2


def test_fine_tuning_between_cuts(fitted, laplace):
    for bnn in (fitted, laplace):
        pruned = bl.prune(
            bnn, bl.Budget(sparsity=0.5), steps=2, refresh=loader(), fine_tune={"epochs": 1, "lr": 1e-3, "seed": 0}
        )
        assert pruned.step == bnn.step + 6
        assert sum(int((~m).sum()) for m in pruned.masks.values()) == 24
        assert all(not bool(pruned.model.get_parameter(n)[~m].any()) for n, m in pruned.masks.items())
        assert bl.predict(pruned, EXAMPLE).probs.shape == (4, 3)
    assert isinstance(pruned.posterior_, Conditioned)


@pytest.mark.parametrize("granularity", ["weight", "unit"])
def test_as_much_as_the_validation_error_allows(fitted, granularity):
    options = {"granularity": granularity, "example": EXAMPLE, "validate": loader(seed=1)}
    before, _ = validation_error(fitted, options["validate"])
    sizes = []
    for allowed in (1.0, 10.0, 40.0):
        pruned = bl.prune(fitted, bl.Budget(max_error_increase=allowed, empty_layers="keep best"), **options)
        after, percent = validation_error(pruned, options["validate"])
        assert percent
        assert after <= before + allowed + 1e-9
        sizes.append(sum(int(m.sum()) for m in pruned.masks.values()) if pruned.masks else 48)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_the_search_in_steps_spends_the_error_bit_by_bit(laplace):
    validate = loader(seed=1)
    before, _ = validation_error(laplace, validate)
    pruned = bl.prune(laplace, bl.Budget(max_error_increase=5.0), validate=validate, steps=2, refresh=loader())
    assert validation_error(pruned, validate)[0] <= before + 5.0 + 1e-9
    once = bl.prune(laplace, bl.Budget(max_error_increase=5.0), validate=validate)
    assert validation_error(once, validate)[0] <= before + 5.0 + 1e-9


def test_as_much_as_the_evidence_allows(fitted):
    pruned = bl.prune(fitted, bl.Budget(evidence=True), validate=loader())
    generator = torch.Generator().manual_seed(0)
    before, after = (
        bl.log_evidence(bnn, loader(), 8, generator=generator.manual_seed(0)).value for bnn in (fitted, pruned)
    )
    assert after >= before
    assert pruned.plan_.cut > 0


def test_the_error_of_values_is_relative():
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = x[:, :1] * 2
    bnn = bl.bayesianize(nn.Linear(3, 1), bl.Variational(), likelihood=bl.likelihoods.Gaussian(noise=0.5), num_data=60)
    with torch.no_grad():
        bnn.model.weight.copy_(torch.tensor([[2.1, 0.01, 0.02]]))
        bnn.model.bias.zero_()
    rmse, percent = validation_error(bnn.eval(), [(x, y)])
    assert not percent
    assert rmse == pytest.approx((bnn.mean_network()(x) - y).square().mean().sqrt().item())
    pruned = bl.prune(bnn, bl.Budget(max_error_increase=30.0), validate=[(x, y)])
    assert pruned.mean_network().weight.count_nonzero() == 1
    with pytest.raises(ShapeMismatch, match="targets"):
        bl.prune(bnn, bl.Budget(max_error_increase=30.0), validate=[(x, torch.zeros(60, 2))])


def test_an_invalid_plan_changes_nothing(fitted):
    before = {n: p.clone() for n, p in fitted.state_dict().items()}
    for plan, error in (
        (Plan({"0.weight": torch.ones(6, 5, dtype=torch.bool)}), NothingToCut),
        (Plan({"0.weight": torch.zeros(6, 5, dtype=torch.bool)}), EmptyLayer),
        (Plan({"0.weight": torch.rand(7, 5) < 0.5}), ShapeMismatch),
        (Plan({"conv.weight": torch.rand(6, 5) < 0.5}), ShapeMismatch),
    ):
        with pytest.raises(error):
            bl.prune(fitted, plan)
    assert same(before, dict(fitted.state_dict()))
    assert fitted.masks == {}


def test_two_plans_that_empty_a_layer_together_are_refused(fitted):
    upper = torch.zeros(6, 5, dtype=torch.bool)
    upper[:3] = True
    once = bl.prune(fitted, Plan({"0.weight": upper}))
    with pytest.raises(EmptyLayer):
        bl.prune(once, Plan({"0.weight": ~upper}))


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        (0.5, {}, "Budget"),
        (bl.Budget(sparsity=0.5), {"steps": 0}, "steps"),
        (bl.Budget(sparsity=0.5), {"steps": 1.5}, "steps"),
        (bl.Budget(sparsity=0.5), {"fine_tune": {"epochs": 1}}, "refresh=loader"),
        (bl.Budget(max_error_increase=1.0), {}, "validate=loader"),
        (bl.Budget(sparsity=0.5), {"granularity": "unit"}, "example=x"),
        (Plan({"0.weight": torch.rand(6, 5) < 0.5}), {"steps": 3}, "belong to a Budget"),
        (Plan({"0.weight": torch.rand(6, 5) < 0.5}), {"criterion": "snr"}, "belong to a Budget"),
    ],
)
def test_what_makes_no_sense_is_refused(fitted, what, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        bl.prune(fitted, what, **options)


def test_nothing_is_left_on_the_original(fitted):
    state = torch.get_rng_state()
    copy_before = copy.deepcopy(fitted)
    bl.prune(fitted, bl.Budget(sparsity=0.5), steps=2)
    assert torch.equal(state, torch.get_rng_state())
    assert same(dict(copy_before.state_dict()), dict(fitted.state_dict()))
    with pytest.raises(TypeError, match="bayesianize"):
        bl.prune(fitted.model, bl.Budget(sparsity=0.5))


def test_a_method_without_a_fit_of_its_own_is_refreshed_by_training():
    assert type(Given()).fit is not bl.Method.fit
    bnn = variational()
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.3), refresh=loader())
    assert pruned.step == bnn.step + 3
