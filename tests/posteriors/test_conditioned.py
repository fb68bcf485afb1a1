import pytest
import torch
from dense_gaussians import (
    Layer,
    assert_moments,
    dense_conditional,
    eye,
    flat,
    network,
    random_masks,
    stack,
    unflat,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.errors import BayeslimWarning, ShapeMismatch
from bayeslim.posteriors import Conditioned, Dense, Kronecker, KroneckerFactors, LowRank, kept
from bayeslim.posteriors.factor import Factor

TIGHT = {"tolerance": 1e-12}
BY_NAME = {"fc.weight": 0.3, "fc.bias": 4.0, "conv": 2.0, "up": 1.1, "words": 0.2, "norm": 5.0}


def close(a, b, tolerance=1e-8):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def families():
    """Each family with its dense precision, over the same parameters."""
    generator = torch.Generator().manual_seed(3)
    kronecker, curvature = network(prior=BY_NAME)
    delta = torch.cat(
        [
            torch.full((t.numel(),), BY_NAME.get(name, BY_NAME.get(name.rpartition(".")[0])), dtype=torch.float64)
            for name, t in kronecker.mean.items()
        ]
    )
    precision = curvature + torch.diag(delta)
    yield "kronecker", kronecker, precision
    yield "dense", Dense(kronecker.mean, curvature, BY_NAME), precision
    directions = torch.randn(len(delta), 5, generator=generator, dtype=torch.float64)
    values = torch.tensor([9.0, 4.0, 1.0, 0.1, 0.0], dtype=torch.float64)
    low = LowRank(kronecker.mean, directions, values, BY_NAME)
    yield "lowrank", low, directions @ torch.diag(values) @ directions.T + torch.diag(delta)


FAMILIES = {name: (posterior, precision) for name, posterior, precision in families()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1])
def test_conditional_against_the_dense_matrix(family, keep):
    base, precision = FAMILIES[family]
    masks = random_masks(base.mean, keep, torch.Generator().manual_seed(5))
    chosen = flat(masks)
    mean, covariance = dense_conditional(flat(base.mean), precision, chosen)
    posterior = base.condition(masks, **TIGHT)
    close(flat(posterior.mean), mean)
    close(flat(posterior.variance), covariance.diagonal())
    inner = precision[chosen][:, chosen]
    close(posterior.log_det_precision(), torch.linalg.slogdet(inner)[1])
    point = torch.randn(len(mean), generator=torch.Generator().manual_seed(6), dtype=torch.float64) * chosen
    oracle = torch.distributions.MultivariateNormal(mean[chosen], precision_matrix=inner)
    close(posterior.log_prob(unflat(point, base.mean)), oracle.log_prob(point[chosen]))
    close(flat(posterior.covariance_product(unflat(point, base.mean))), covariance @ point)
    close(flat(posterior.precision_product(unflat(point, base.mean))), chosen * (precision @ point))


@pytest.mark.parametrize("family", FAMILIES)
def test_matheron_samples_have_the_conditional_moments(family):
    base, precision = FAMILIES[family]
    masks = random_masks(base.mean, 0.4, torch.Generator().manual_seed(5))
    mean, covariance = dense_conditional(flat(base.mean), precision, flat(masks))
    posterior = base.condition(masks, tolerance=1e-9)
    samples = posterior.sample(10_000, generator=torch.Generator().manual_seed(7))
    assert_moments(stack(samples), mean, covariance)
    assert bool((stack(samples)[:, ~flat(masks)] == 0).all())
    # the test could tell: the base's own moments are elsewhere
    with pytest.raises(AssertionError):
        assert_moments(stack(base.sample(10_000)) * flat(masks), mean, covariance)


@pytest.mark.parametrize("family", FAMILIES)
def test_conditioning_twice_is_conditioning_once(family):
    base, _ = FAMILIES[family]
    first, second = (random_masks(base.mean, 0.6, torch.Generator().manual_seed(s)) for s in (1, 2))
    both = {name: first[name] & second[name] for name in first}
    twice, once = base.condition(first, **TIGHT).condition(second, **TIGHT), base.condition(both, **TIGHT)
    close(flat(twice.mean), flat(once.mean))
    close(flat(twice.variance), flat(once.variance))
    # and the same as conditioning the conditional itself, without its base
    again = Conditioned(base.condition(first, **TIGHT), second, {}.fromkeys(base.mean, torch.zeros(())))
    close(flat(again.variance), flat(once.variance))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_survivors_are_the_best_ones(family):
    base, _ = FAMILIES[family]
    masks = random_masks(base.mean, 0.5, torch.Generator().manual_seed(1))
    posterior = base.condition(masks, **TIGHT)
    least = base.quadratic(posterior.mean)
    assert least < base.quadratic({name: t * masks[name] for name, t in base.mean.items()})
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        nudged = {
            name: t + 1e-3 * torch.randn(t.shape, generator=generator, dtype=torch.float64) * masks[name]
            for name, t in posterior.mean.items()
        }
        assert base.quadratic(nudged) > least


@settings(max_examples=20, deadline=None)
@given(
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 5),
    groups=st.integers(1, 2),
    rank=st.integers(1, 7),
    bias=st.booleans(),
    prior=st.floats(0.05, 20),
    cut=st.sampled_from(["nothing", "all", "row", "column", "some"]),
    seed=st.integers(0, 2**31),
)
def test_any_mask_of_any_layer(outputs, inputs, groups, rank, bias, prior, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = Layer("fc", (groups * outputs, inputs), generator, groups=groups, rank=rank, bias=bias)
    base = Kronecker(layer.mean(generator), [layer.factors()], prior)
    precision = layer.precision() + prior * eye(len(layer.precision()))
    masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in base.mean.items()}
    if cut == "all":
        masks = {name: torch.zeros_like(mask) for name, mask in masks.items()}
    elif cut == "row":
        masks["fc.weight"][0] = False
    elif cut == "column":
        masks["fc.weight"][:, 0] = False
    elif cut == "some":
        masks = random_masks(base.mean, 0.5, generator)
    mean, covariance = dense_conditional(flat(base.mean), precision, flat(masks))
    posterior = base.condition(masks, **TIGHT)
    close(flat(posterior.mean), mean, 1e-7)
    close(flat(posterior.variance), covariance.diagonal(), 1e-7)
    inner = precision[flat(masks)][:, flat(masks)]
    close(posterior.log_det_precision(), torch.linalg.slogdet(inner)[1])
    row = base.condition(masks, how="row")
    assert bool((flat(row.mean)[~flat(masks)] == 0).all())
    if cut in ("nothing", "all"):
        close(flat(row.mean), mean, 1e-7)
    sample = posterior.sample(generator=generator)
    assert torch.isfinite(posterior.log_prob(sample))


def rowwise_oracle(layer, prior, mean, kept_weights):
    """Each row of V by itself, with precision G_oo A + δ I."""
    matrix = torch.cat([mean["fc.weight"], mean["fc.bias"][:, None]], 1)
    chosen = torch.cat([kept_weights["fc.weight"], kept_weights["fc.bias"][:, None]], 1)
    moved = torch.zeros_like(matrix)
    for o, row in enumerate(matrix):
        precision = layer.G[0, o, o] * layer.A[0] + prior * eye(len(row))
        moved[o] = dense_conditional(row, precision, chosen[o])[0]
    return {"fc.weight": moved[:, :-1], "fc.bias": moved[:, -1]}


@pytest.mark.parametrize("corrected", [False, True])
def test_rowwise_is_exact_only_if_outputs_are_independent(corrected):
    generator = torch.Generator().manual_seed(0)
    layer = Layer("fc", (4, 6), generator)
    mean = layer.mean(generator)
    masks = random_masks(mean, 0.5, generator)
    for independent in (True, False):
        if independent:
            whole, layer.G = layer.G, torch.diag_embed(layer.G.diagonal(dim1=1, dim2=2))
        else:
            layer.G = whole
        factors = layer.factors()
        if corrected:
            values = factors.outputs.values[:, :, None] * factors.inputs.values[:, None, :]
            factors = KroneckerFactors(factors.weight, factors.outputs, factors.inputs, factors.bias, values)
        base = Kronecker(mean, [factors], 0.4)
        joint, row = base.condition(masks, **TIGHT), base.condition(masks, how="row")
        close(flat(row.mean), flat(rowwise_oracle(layer, 0.4, mean, masks)))
        apart = float((flat(row.mean) - flat(joint.mean)).abs().max())
        assert apart < 1e-8 if independent else apart > 1e-2
        if not independent:
            assert base.quadratic(joint.mean) < base.quadratic(row.mean)
        precision = layer.precision() + 0.4 * eye(len(layer.precision()))
        covariance = dense_conditional(flat(mean), precision, flat(masks))[1]
        close(flat(row.variance), covariance.diagonal())
        close(row.log_det_precision(), torch.linalg.slogdet(precision[flat(masks)][:, flat(masks)])[1])


def test_rowwise_covers_groups_scales_and_diagonal_inputs(monkeypatch):
    base, _ = network(prior=BY_NAME)
    masks = random_masks(base.mean, 0.6, torch.Generator().manual_seed(2))
    whole = base.condition(masks, how="row")
    monkeypatch.setattr(kept, "MAX_NUMBERS_PER_CHUNK", 1)
    close(flat(base.condition(masks, how="row").mean), flat(whole.mean))
    independent = Kronecker(
        base.mean,
        [
            KroneckerFactors(f.weight, Factor(f.outputs.diagonal, None), f.inputs, f.bias, transposed=f.transposed)
            for f in base.factors
        ],
        BY_NAME,
        rest=base.rest_curvature,
    )
    close(flat(independent.condition(masks, **TIGHT).mean), flat(whole.mean))
    with pytest.raises(ValueError, match="Kronecker"):
        FAMILIES["dense"][0].condition(masks, how="row")
    with pytest.raises(ValueError, match='"joint" or "row"'):
        base.condition(masks, how="column")


def realistic(seed=0, outputs=40, inputs=50):
    """Factors with the decaying spectra of a trained layer."""
    generator = torch.Generator().manual_seed(seed)
    matrices = []
    for size, top in ((outputs, 30.0), (inputs, 300.0)):
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
        matrices.append(basis @ torch.diag(top / torch.arange(1, size + 1, dtype=torch.float64) ** 1.5) @ basis.T)
    mean = {"w": torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)}
    return Kronecker(mean, [KroneckerFactors.of("w", outputs=matrices[0], inputs=matrices[1])], 0.1)


def test_estimates_for_large_layers(monkeypatch):
    base = realistic()
    masks = random_masks(base.mean, 0.5, torch.Generator().manual_seed(1))
    exact = base.condition(masks)
    variance, log_det = exact.variance["w"], exact.log_det_precision()
    monkeypatch.setattr(kept, "MAX_EXACT_WEIGHTS", 0)
    large = base.condition(masks)
    estimate, chosen = large.variance["w"], masks["w"]
    assert bool((estimate[~chosen] == 0).all())
    # between the variance given all other rows and that before the cut, and closer to the truth than either
    given_rows = kept._rowwise_variance(base.blocks[0], chosen[None])[0]
    before = base.variance["w"]
    assert bool(((given_rows <= estimate * (1 + 1e-9)) & (estimate <= before * (1 + 1e-9)))[chosen].all())

    def error(guess):
        return float((guess / variance)[chosen].log().abs().median())

    assert error(estimate) < 0.3 < 0.4 < min(error(given_rows), error(before))
    assert large.log_det_precision() == large.log_det_precision()
    assert abs(large.log_det_precision() - log_det) < 0.02 * abs(log_det)
    # nothing cut: exact
    whole = base.condition({})
    close(whole.variance["w"], base.variance["w"])


def test_estimates_are_exact_where_outputs_are_independent(monkeypatch):
    monkeypatch.setattr(kept, "MAX_EXACT_WEIGHTS", 0)
    generator = torch.Generator().manual_seed(0)
    layer = Layer("fc", (4, 6), generator)
    layer.G = torch.diag_embed(layer.G.diagonal(dim1=1, dim2=2))
    base = Kronecker(layer.mean(generator), [layer.factors()], 0.4)
    masks = random_masks(base.mean, 0.5, generator)
    precision = layer.precision() + 0.4 * eye(len(layer.precision()))
    close(
        flat(base.condition(masks).variance), dense_conditional(flat(base.mean), precision, flat(masks))[1].diagonal()
    )


def test_few_iterations_are_enough_and_too_few_are_reported(monkeypatch):
    base = realistic()
    masks = random_masks(base.mean, 0.3, torch.Generator().manual_seed(1))
    block = kept.KeptBlock(base.blocks[0], masks["w"][None])
    rhs = torch.randn(3, 1, 40, 50, dtype=torch.float64)
    solved = block.solve(rhs)
    close(block.product(solved), rhs * masks["w"], 1e-3)
    exact = base.condition(masks)
    assert exact.solves["w"].converged
    assert exact.solves["w"].residual < 1e-4
    few = base.condition(masks, max_iterations=2)  # a small layer is then solved directly
    close(flat(few.mean), flat(exact.mean), 1e-3)
    monkeypatch.setattr(kept, "MAX_EXACT_WEIGHTS", 0)
    with pytest.warns(BayeslimWarning, match="stopped after 2 iterations"):
        rough = base.condition(masks, max_iterations=2)
    assert not rough.solves["w"].converged
    rows = base.condition(masks, how="row")
    assert base.quadratic(rough.mean) <= base.quadratic(rows.mean) * (1 + 1e-9)
    with pytest.raises(ValueError, match="tolerance"):
        base.condition(masks, tolerance=0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_is_the_same(family):
    base, _ = FAMILIES[family]
    posterior = base.condition(random_masks(base.mean, 0.5, torch.Generator().manual_seed(1)), tolerance=1e-4)
    again = Conditioned.restore(posterior.config(), posterior.tensors())
    assert type(again.base) is type(base)
    assert again.solver == posterior.solver
    for a, b in ((again.mean, posterior.mean), (again.masks, posterior.masks), (again.variance, posterior.variance)):
        assert torch.equal(flat(a), flat(b))
    one, two = (p.sample(2, generator=torch.Generator().manual_seed(0)) for p in (again, posterior))
    assert torch.equal(flat(one), flat(two))


@pytest.mark.parametrize("family", FAMILIES)
def test_another_prior_precision_keeps_the_zeros(family):
    base, _ = FAMILIES[family]
    masks = random_masks(base.mean, 0.5, torch.Generator().manual_seed(1))
    again = base.condition(masks).with_prior_precision(9.0)
    wanted = base.with_prior_precision(9.0).condition(masks)
    close(flat(again.variance), flat(wanted.variance))
    assert torch.equal(flat(again.support), flat(masks))


def test_a_missed_point_mass_has_no_density():
    base, _ = FAMILIES["kronecker"]
    posterior = base.condition({"fc.weight": torch.zeros(4, 5, dtype=torch.bool)})
    assert torch.isfinite(posterior.log_prob(posterior.mean))
    assert posterior.log_prob(base.mean) == -torch.inf
    with pytest.raises(ShapeMismatch, match="fc"):
        posterior.log_prob(posterior.mean | {"fc.weight": torch.zeros(3)})
    with pytest.raises(ShapeMismatch, match="conv"):
        base.condition({"conv.wait": torch.zeros(1)})


@pytest.mark.parametrize("family", FAMILIES)
def test_functional_covariance_of_materialised_jacobians(family):
    base, precision = FAMILIES[family]
    masks = random_masks(base.mean, 0.5, torch.Generator().manual_seed(1))
    jacobian = {name: torch.randn(2, 3, *t.shape, dtype=torch.float64) for name, t in base.mean.items()}
    rows = torch.cat([t.flatten(2) for t in jacobian.values()], 2)
    close(base.functional_covariance(jacobian), rows @ torch.linalg.inv(precision) @ rows.mT)
    covariance = dense_conditional(flat(base.mean), precision, flat(masks))[1]
    close(base.condition(masks, **TIGHT).functional_covariance(jacobian), rows @ covariance @ rows.mT, 1e-4)
