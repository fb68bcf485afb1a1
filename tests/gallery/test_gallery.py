"""The pictures: their numbers against exact answers, and that each is drawn in both themes."""

from __future__ import annotations

import inspect
import math
import re
import sys

import pytest
import torch

import bayeslim as bl
from bayeslim.app.style import DARK, LIGHT, THEMES, styled
from bayeslim.gallery import (
    PICTURES,
    conditioning,
    elbo_ascent,
    laplace_fits,
    load_picture,
    pruned_weights,
    regression_bands,
    renyi_bound,
    renyi_family,
    save_picture,
    snr_histogram,
    sparse_masks,
    two_modes,
    two_moons,
    unknown_images,
    weight_histograms,
)
from bayeslim.gallery.catalogue import as_gif, as_svg
from bayeslim.gallery.correlated import solve_regression
from bayeslim.gallery.one_weight import Squared, gaussian_density, solve_on_grid

# Posteriors of a few epochs are enough to draw.
pytestmark = pytest.mark.filterwarnings("ignore::bayeslim.errors.BayeslimWarning")


def drawn(module, found):
    """Draw a picture; return its text."""
    with styled(LIGHT):
        text = as_svg(module.draw(found, LIGHT)).decode()
    assert LIGHT.ink in text
    assert not re.search(r"\bnan\b", re.sub(r'"data:[^"]*"', "", text), re.IGNORECASE)
    return text


def luminance(colour: str) -> float:
    """Compute the relative luminance of a colour, as WCAG defines it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_colours_stand_out_from_the_page(theme):
    paper = luminance(theme.paper)
    for colour in (theme.ink, theme.quiet, *theme.colours):
        high, low = sorted((luminance(colour), paper), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, colour


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_says_its_idea_and_its_source(name):
    picture = load_picture(name)
    assert picture.title
    assert len(picture.about) > 200
    assert "    " in picture.about or "|μ| / σ" in picture.about, "an equation"
    assert re.search(r"\b(19|20)\d\d\b", picture.about) or "bl." in picture.about or "Hamiltonian" in picture.about
    assert len(inspect.getsource(sys.modules[picture.measure.__module__]).splitlines()) < 160


def test_unknown_names_and_a_missing_extra_are_named(monkeypatch):
    with pytest.raises(bl.errors.BayeslimError, match=r'no picture "renyi_famly"\. Closest names: "renyi_family"'):
        load_picture("renyi_famly")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(bl.errors.MissingExtra, match=r"The gallery needs matplotlib.*bayeslim\[plots\]"):
        load_picture("renyi_family")


def test_the_evidence_on_a_grid_is_that_of_linear_regression():
    x, y = torch.tensor([[0.5], [1.0], [-0.3]]), torch.tensor([[0.2], [0.9], [-0.4]])
    network = torch.nn.Linear(1, 1, bias=False)
    found = solve_on_grid(
        network, bl.likelihoods.Gaussian(0.5), bl.priors.Normal(1.0), x, y, torch.linspace(-6, 6, 4001)
    )
    scatter = x.double() @ x.double().T + 0.25 * torch.eye(3, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros(3).double(), scatter).log_prob(y.double().squeeze(1))
    assert found.log_evidence == pytest.approx(float(exact), abs=1e-5)
    precision = float(x.square().sum() / 0.25 + 1)
    mean = float((x * y).sum() / 0.25) / precision
    assert found.distance(gaussian_density(found.grid, mean, precision**-0.5)) < 1e-4


def test_the_regression_is_exact_and_its_posterior_is_that_of_laplace():
    found = solve_regression(correlation=0.7)
    bnn = found.bayesian(bl.Laplace("full"))
    bnn.fit([(found.x, found.y)], progress=False)
    torch.testing.assert_close(bnn.posterior_.covariance, found.covariance, rtol=1e-4, atol=1e-6)
    assert bl.log_evidence(bnn, [(found.x, found.y)], progress=False).value == pytest.approx(
        found.log_evidence, abs=1e-3
    )
    assert float(found.covariance[0, 0]) == pytest.approx(float(found.covariance[1, 1]))


def test_the_bound_and_the_divergence_sum_to_the_evidence():
    found = elbo_ascent.measure()
    total = found.bounds + found.divergences
    torch.testing.assert_close(total, torch.full_like(total, found.exact.log_evidence), rtol=0, atol=1e-3)
    assert found.bounds[-1] > found.bounds[0] + 10
    assert float(found.divergences[-1]) < 0.05
    drawn(elbo_ascent, found)


@pytest.mark.parametrize("alpha", [-50.0, -1.0, -0.2, 0.3, 0.5, 0.9, 1.0, 1.5, 4.0, 60.0])
def test_the_variance_of_q_minimises_the_renyi_divergence(alpha):
    """Against a search on the bound itself, in its general form."""
    regression = solve_regression(correlation=-0.85)
    small, large = torch.linalg.eigvalsh(regression.covariance).tolist()
    best = renyi_family.best_variance(alpha, large, small)
    assert small - 1e-9 <= best <= large + 1e-9
    values = {
        scale: renyi_bound.limit(
            alpha, regression.mean, torch.full((2,), math.sqrt(scale * best), dtype=torch.float64), regression
        )
        for scale in (0.99, 1.0, 1.01)
    }
    assert math.isfinite(values[1.0])
    sign = 1 if alpha > 0 else -1
    assert sign * values[1.0] >= max(sign * values[0.99], sign * values[1.01]), "no better variance nearby"
    assert sign * (regression.log_evidence - values[1.0]) >= 0, "a lower bound for α > 0, an upper one for α < 0"


def test_the_renyi_family_goes_from_inside_to_around():
    found = renyi_family.measure()
    variances = [found.variances[alpha] for alpha in renyi_family.ORDERS]
    assert variances == sorted(variances)
    assert found.variances[0.0] == pytest.approx(float(found.regression.covariance[0, 0]))
    assert found.fitted_variance == pytest.approx(found.variances[1.0], rel=0.1)
    drawn(renyi_family, found)


def test_the_bound_never_exceeds_the_evidence_and_k_1_is_the_elbo(monkeypatch):
    monkeypatch.setattr(renyi_bound, "REPEATS", 2000)
    found = renyi_bound.measure()
    for (alpha, _), (value, error) in found.estimates.items():
        if alpha >= 0:
            assert value <= found.log_evidence + 4 * error
    ones = [value for (_, count), (value, _) in found.estimates.items() if count == 1]
    assert max(ones) - min(ones) < 1e-6
    elbo, error = found.estimates[1.0, 50]
    assert found.limits[1.0] == pytest.approx(elbo, abs=5 * error)
    assert found.limits[0.0] == pytest.approx(found.log_evidence, abs=1e-6)
    for count in renyi_bound.DRAWS[1:]:
        values = [found.estimates[alpha, count][0] for alpha in sorted(renyi_bound.ALPHAS.tolist())]
        assert values == sorted(values, reverse=True), "it falls as α rises"
    drawn(renyi_bound, found)


def test_laplace_is_good_where_the_posterior_is_gaussian():
    good, skewed, modes = laplace_fits.measure()
    assert good.distance < 0.06 < skewed.distance < modes.distance
    assert modes.distance == pytest.approx(0.5, abs=0.06)
    drawn(laplace_fits, [good, skewed, modes])


def test_squared_has_two_modes_of_equal_mass():
    x, y = torch.ones(5, 1), torch.full((5, 1), 1.0)
    found = solve_on_grid(
        Squared(1.0), bl.likelihoods.Gaussian(0.5), bl.priors.Normal(1.0), x, y, torch.linspace(-3, 3, 1201)
    )
    torch.testing.assert_close(found.posterior, found.posterior.flip(0), rtol=1e-3, atol=1e-6)


def test_a_mixture_finds_the_mode_that_a_gaussian_misses():
    found = two_modes.measure()
    assert found.exact.distance(found.mixture) < 0.15 < 0.45 < found.exact.distance(found.gaussian)
    assert found.gaussian_bound < found.mixture_bound < found.exact.log_evidence + 0.05
    assert found.mixture_bound - found.gaussian_bound == pytest.approx(math.log(2), abs=0.15)
    drawn(two_modes, found)


def test_conditioning_moves_the_survivor_and_costs_less():
    found = conditioning.measure()
    mean, cov = found.regression.mean, found.regression.covariance
    assert float(found.moved[1]) == 0
    assert float(found.moved[0]) == pytest.approx(float(mean[0] - cov[0, 1] / cov[1, 1] * mean[1]), rel=1e-4)
    assert found.moved_cost == pytest.approx(float(mean[1] ** 2 / (2 * cov[1, 1])), rel=1e-4)
    assert found.moved_cost < found.zeroed_cost
    assert found.moved_std**2 == pytest.approx(float(cov[0, 0] - cov[0, 1] ** 2 / cov[1, 1]), rel=1e-3)
    drawn(conditioning, found)


def test_cuts_of_digits(monkeypatch):
    monkeypatch.setattr(snr_histogram, "fit_digits", short_fit)
    monkeypatch.setattr(pruned_weights, "fit_digits", short_fit)
    snr = snr_histogram.measure()
    for sparsity, cutoff in snr.cutoffs.items():
        assert float((snr.decibels <= cutoff).float().mean()) == pytest.approx(sparsity, abs=0.01)
    drawn(snr_histogram, snr)
    cut = pruned_weights.measure()
    size = len(snr.decibels)
    for title, survivors in cut.survivors.items():
        for sparsity, weights in survivors.items():
            assert len(weights) == pytest.approx((1 - sparsity) * size, abs=2), title
    by_size = cut.survivors["Magnitude, |μ|"]
    assert float(by_size[0.5].abs().min()) >= float(by_size[0.0].abs().median()) * 0.99, "a straight side"
    drawn(pruned_weights, cut)


REAL_FIT = snr_histogram.fit_digits


def short_fit(prior, epochs, callbacks=()):
    return REAL_FIT(prior, 2, callbacks)


def test_weights_of_the_scale_mixture_gather_around_zero(monkeypatch):
    monkeypatch.setattr(weight_histograms, "EPOCHS", (1, 5))
    found = weight_histograms.measure()
    for histograms in found.histograms.values():
        assert list(histograms) == [1, 5]
        assert all(0.9 < float(shares.sum()) <= 1 + 1e-5 for shares in histograms.values())
    small = (weight_histograms.EDGES[1:].abs() < 0.2) & (weight_histograms.EDGES[:-1].abs() < 0.2)
    shares = {name: float(histograms[5][small].sum()) for name, histograms in found.histograms.items()}
    assert shares["Scale-mixture prior"] > shares["Gaussian prior"]
    drawn(weight_histograms, found)


def test_masks_empty_during_sparse_vd(monkeypatch):
    monkeypatch.setattr(sparse_masks, "EPOCHS", 8)
    monkeypatch.setattr(sparse_masks, "EPOCHS_PER_FRAME", 4)
    monkeypatch.setattr(sparse_masks, "EPOCHS_DENSE", 4)
    frames = sparse_masks.measure()
    assert [frame.epoch for frame in frames] == [0, 4, 8]
    left = [float(frame.mask.float().mean()) for frame in frames]
    assert left[0] > 0.95
    assert left[0] > left[1] > left[2]
    with styled(LIGHT):
        content = as_gif(sparse_masks.draw_frames(frames, LIGHT), LIGHT)
    from io import BytesIO

    from PIL import Image

    image = Image.open(BytesIO(content))
    assert image.n_frames == 3
    drawn(sparse_masks, frames)


def test_bands_are_of_every_method():
    methods = {type(case.method()) for case in regression_bands.CASES.values()}
    public = {value for name in bl.__all__ if isinstance(value := getattr(bl, name), type)}
    assert methods == {m for m in public if issubclass(m, bl.Method) and m is not bl.Method}


def test_a_band_is_wider_where_there_are_no_data():
    found = regression_bands.measure(("Laplace, full",))
    _, std = found.bands["Laplace, full"]
    gap, data = found.inputs.abs() < 0.5, (found.inputs > 1.4) & (found.inputs < 2)
    assert float(std[gap].mean()) > 2 * float(std[data].mean())
    assert float(std.min()) >= regression_bands.NOISE * 0.99, "the noise is part of it"
    drawn(regression_bands, found)


def test_boundaries_tell_the_moons_apart():
    found = two_moons.measure(("Plain network", "Laplace"))
    places = ((found.x + two_moons.REACH) / (2 * two_moons.REACH) * (two_moons.SIDE - 1)).round().long()
    for name, probabilities in found.probabilities.items():
        right = (probabilities[places[:, 1], places[:, 0]] > 0.5) == (found.y.squeeze(1) > 0.5)
        assert float(right.float().mean()) > 0.95, name
    plain, laplace = (found.probabilities[name] for name in ("Plain network", "Laplace"))
    assert float((laplace - 0.5).abs().mean()) < float((plain - 0.5).abs().mean()), "less sure"
    drawn(two_moons, found)


def test_unknown_images_have_more_entropy(monkeypatch):
    monkeypatch.setattr(unknown_images, "METHODS", {"Plain network": None, "Laplace": bl.Laplace("diag")})
    monkeypatch.setattr(unknown_images, "EPOCHS", 6)
    found = unknown_images.measure()
    assert all(auroc > 0.8 for auroc in found.auroc.values())
    assert len(found.known["Laplace"]) + len(found.unknown["Laplace"]) == 500


def test_a_picture_is_saved_in_both_themes_the_same_every_time(tmp_path):
    picture = load_picture("conditioning")
    for folder in ("one", "two"):
        files = save_picture(picture, tmp_path / folder, list(THEMES.values()))
        assert [file.name for file in files] == ["conditioning_light.svg", "conditioning_dark.svg"]
    for name, theme in (("conditioning_light.svg", LIGHT), ("conditioning_dark.svg", DARK)):
        assert theme.ink in (tmp_path / "one" / name).read_text(encoding="utf-8")
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_settings_of_the_user_are_left_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    with styled(DARK):
        assert matplotlib.rcParams["text.color"] == DARK.ink
    assert dict(matplotlib.rcParams) == before
