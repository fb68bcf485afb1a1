import math

import pytest
import torch
from dense_gaussians import Layer, assert_moments, eye, flat, network, psd, stack, unflat
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.errors import NotPositiveDefinite, ShapeMismatch
from bayeslim.posteriors import Kronecker, KroneckerFactors
from bayeslim.posteriors.factor import Factor


def close(a, b, tolerance=1e-8):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rank", [None, 1])
def test_everything_against_the_dense_matrix(rank):
    posterior, curvature = network(rank=rank)
    precision = curvature + 0.7 * eye(len(curvature))
    covariance = torch.linalg.inv(precision)
    point = torch.randn(len(precision), dtype=torch.float64)
    params = unflat(point, posterior.mean)
    close(flat(posterior.variance), covariance.diagonal())
    close(posterior.log_det_precision(), torch.linalg.slogdet(precision)[1])
    close(flat(posterior.precision_product(params)), precision @ point)
    close(flat(posterior.covariance_product(params)), covariance @ point)
    off = point - flat(posterior.mean)
    close(posterior.quadratic(params), off @ precision @ off)
    dense = torch.distributions.MultivariateNormal(flat(posterior.mean), precision_matrix=precision)
    close(posterior.log_prob(params), dense.log_prob(point))


def test_products_take_stacked_parameters():
    posterior, _ = network()
    stacked = {name: torch.randn(3, *t.shape, dtype=torch.float64) for name, t in posterior.mean.items()}
    for product in (posterior.precision_product, posterior.covariance_product):
        together = product(stacked)
        for n in range(3):
            alone = product({name: t[n] for name, t in stacked.items()})
            close(flat({name: t[n] for name, t in together.items()}), flat(alone))


def test_samples_have_the_right_moments():
    posterior, curvature = network()
    covariance = torch.linalg.inv(curvature + 0.7 * eye(len(curvature)))
    samples = posterior.sample(20_000, generator=torch.Generator().manual_seed(1))
    assert_moments(stack(samples), flat(posterior.mean), covariance)
    one = posterior.sample(generator=torch.Generator().manual_seed(1))
    assert {name: t.shape for name, t in one.items()} == {name: t.shape for name, t in posterior.mean.items()}


@settings(max_examples=30, deadline=None)
@given(
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 5),
    groups=st.integers(1, 3),
    kernel=st.integers(1, 2),
    transposed=st.booleans(),
    bias=st.booleans(),
    rank=st.integers(1, 4),
    prior=st.floats(1e-2, 1e2),
    seed=st.integers(0, 2**31),
)
def test_any_layer_against_the_dense_matrix(outputs, inputs, groups, kernel, transposed, bias, rank, prior, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (groups * inputs, outputs, kernel) if transposed else (groups * outputs, inputs, kernel)
    layer = Layer("conv", shape, generator, groups=groups, transposed=transposed, bias=bias, rank=rank)
    posterior = Kronecker(layer.mean(generator), [layer.factors()], prior)
    precision = layer.precision() + prior * eye(len(layer.precision()))
    close(flat(posterior.variance), torch.linalg.inv(precision).diagonal(), 1e-7)
    close(posterior.log_det_precision(), torch.linalg.slogdet(precision)[1])
    close(flat(posterior.precision_product(posterior.mean)), precision @ flat(posterior.mean))


PRIORS = {
    "one a layer": {"fc": 0.3, "conv": 2.0, "up": 1.1, "words": 0.2, "norm": 5.0},
    "weight and bias apart": {"fc.weight": 0.3, "fc.bias": 4.0, "conv": 2.0, "up": 1.1, "words": 0.2, "norm": 5.0},
    "a row each": {
        "fc.weight": torch.tensor([[0.5], [1.0], [2.0], [4.0]]),
        "fc.bias": torch.tensor([1.0, 2.0, 4.0, 8.0]),
        "conv": 2.0,
        "up": 1.1,
        "words": torch.arange(1.0, 7.0)[:, None],
        "norm": torch.tensor([1.0, 2.0, 3.0]),
    },
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_priors_that_differ_between_weights_are_exact(prior):
    posterior, curvature = network(prior=prior)
    delta = []
    for name, value in posterior.mean.items():
        entry = prior[name] if name in prior else prior[name.rpartition(".")[0]]
        delta.append(torch.as_tensor(entry, dtype=torch.float64).expand(value.shape).flatten())
    precision = curvature + torch.diag(torch.cat(delta))
    covariance = torch.linalg.inv(precision)
    point = torch.randn(len(precision), dtype=torch.float64)
    close(flat(posterior.variance), covariance.diagonal())
    close(posterior.log_det_precision(), torch.linalg.slogdet(precision)[1])
    close(flat(posterior.precision_product(unflat(point, posterior.mean))), precision @ point)
    close(flat(posterior.covariance_product(unflat(point, posterior.mean))), covariance @ point)
    samples = posterior.sample(20_000, generator=torch.Generator().manual_seed(2))
    assert_moments(stack(samples), flat(posterior.mean), covariance)


def test_another_prior_precision_is_a_new_posterior_without_a_new_decomposition(monkeypatch):
    posterior, _ = network()
    wanted, _ = network(prior=3.0)
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("decomposed again"))
    again = posterior.with_prior_precision(3.0)
    assert torch.equal(again.log_det_precision(), wanted.log_det_precision())
    assert torch.equal(flat(again.variance), flat(wanted.variance))


@pytest.mark.parametrize("apart", [False, True])
def test_log_determinant_is_differentiable_in_the_prior_precision(apart):
    posterior, curvature = network(rank=2)
    names = list(posterior.mean) if apart else ["fc", "conv", "up", "words", "norm"]
    values = {
        name: torch.tensor(0.5 + 0.1 * n, dtype=torch.float64, requires_grad=True) for n, name in enumerate(names)
    }
    posterior.with_prior_precision(values).log_det_precision().backward()
    delta = torch.cat(
        [
            values[name if apart else name.rpartition(".")[0]].detach().expand(t.shape).flatten()
            for name, t in posterior.mean.items()
        ]
    )
    inverse = unflat(torch.linalg.inv(curvature + torch.diag(delta)).diagonal(), posterior.mean)
    for name, value in values.items():
        mine = [n for n in inverse if n == name or n.rpartition(".")[0] == name]
        close(value.grad, sum(inverse[n].sum() for n in mine))


def test_corrected_eigenvalues_replace_the_products():
    generator = torch.Generator().manual_seed(0)
    layer = Layer("fc", (3, 4), generator)
    outputs, inputs = Factor.of(layer.G), Factor.of(layer.A)
    corrected = torch.rand(1, 3, 5, generator=generator, dtype=torch.float64)
    posterior = Kronecker(
        layer.mean(generator), [KroneckerFactors("fc.weight", outputs, inputs, "fc.bias", corrected)], 0.5
    )
    basis = torch.kron(outputs.vectors[0], inputs.vectors[0])
    matrix = basis @ torch.diag(corrected.flatten() + 0.5) @ basis.T
    # the matrix is over V row by row, the posterior over weight, then bias
    order = torch.cat([torch.arange(15).reshape(3, 5)[:, :4].flatten(), torch.arange(15).reshape(3, 5)[:, 4]])
    matrix = matrix[order][:, order]
    close(flat(posterior.variance), torch.linalg.inv(matrix).diagonal())
    close(posterior.log_det_precision(), torch.linalg.slogdet(matrix)[1])
    close(flat(posterior.precision_product(posterior.mean)), matrix @ flat(posterior.mean))
    with pytest.raises(ValueError, match="one prior precision"):
        posterior.with_prior_precision({"fc.weight": 1.0, "fc.bias": 2.0})
    with pytest.raises(ShapeMismatch, match="corrected"):
        Kronecker(posterior.mean, [KroneckerFactors("fc.weight", outputs, inputs, "fc.bias", corrected[:, :2])])


def test_square_root_damping_overstates_the_precision_by_its_known_error():
    generator = torch.Generator().manual_seed(0)
    layer = Layer("fc", (3, 4), generator, bias=False)
    mean, delta = layer.mean(generator), 0.6
    damped = Kronecker(mean, [layer.factors()], delta, damping="sqrt")
    ratio = math.sqrt(layer.A[0].trace() / 4 / (layer.G[0].trace() / 3))
    excess = torch.kron(layer.G[0], math.sqrt(delta) * ratio * eye(4)) + torch.kron(
        math.sqrt(delta) / ratio * eye(3), layer.A[0]
    )
    exact = layer.precision() + delta * eye(12)
    close(flat(damped.precision_product(mean)), (exact + excess) @ flat(mean))
    close(flat(damped.variance), torch.linalg.inv(exact + excess).diagonal())
    assert bool((flat(damped.variance) < flat(Kronecker(mean, [layer.factors()], delta).variance)).all())


def test_dead_units_fall_back_to_the_prior():
    generator = torch.Generator().manual_seed(0)
    layer = Layer("fc", (3, 4), generator)
    layer.G[0, 1], layer.G[0, :, 1] = 0, 0
    posterior = Kronecker(layer.mean(generator), [layer.factors()], 4.0)
    close(posterior.variance["fc.weight"][1], torch.full((4,), 0.25, dtype=torch.float64))
    nothing = KroneckerFactors.of("w", outputs=torch.zeros(2, 2), inputs=torch.zeros(3, 3))
    close(Kronecker({"w": torch.zeros(2, 3)}, [nothing], 4.0).variance["w"], torch.full((2, 3), 0.25))


def test_rounding_below_zero_is_clamped_and_more_is_refused():
    vectors = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    tiny = vectors @ torch.diag(torch.tensor([1.0, 0.5, 1e-3, -1e-12], dtype=torch.float64)) @ vectors.T
    assert float(Factor.of(tiny).values.min()) == 0
    with pytest.raises(NotPositiveDefinite, match="semi-definite"):
        Factor.of(tiny - 0.1 * eye(4))
    with pytest.raises(NotPositiveDefinite, match="finite"):
        Factor.of(tiny * math.nan)
    with pytest.raises(ShapeMismatch, match="must be"):
        Factor.of(tiny[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_means(dtype):
    posterior, _ = network()
    half = Kronecker(
        {name: t.to(dtype) for name, t in posterior.mean.items()},
        [
            KroneckerFactors.of(
                f.weight,
                outputs=f.outputs.matrix.float(),
                inputs=f.inputs.values[0].float() if f.inputs.vectors is None else f.inputs.matrix.float(),
                bias=f.bias,
                transposed=f.transposed,
            )
            for f in posterior.factors
        ],
        0.7,
        rest={"norm.weight": posterior.rest["norm.weight"].to(dtype) - 0.7},
    )
    assert all(t.dtype == dtype for t in half.sample(2).values())
    assert all(t.dtype == torch.float32 for t in half.variance.values())
    close(flat(half.variance).double(), flat(posterior.variance), 2e-2)
    assert torch.isfinite(half.log_prob(half.sample()))
    conditioned = half.condition({"fc.weight": torch.zeros(4, 5, dtype=torch.bool)})
    assert all(t.dtype == dtype for t in conditioned.mean.values())


@pytest.mark.parametrize("damping", ["exact", "sqrt"])
@pytest.mark.parametrize("prior", [0.7, PRIORS["weight and bias apart"]], ids=["one", "many"])
def test_restored_is_the_same(damping, prior):
    posterior, _ = network(prior=prior, damping=damping)
    again = Kronecker.restore(posterior.config(), posterior.tensors())
    assert again.names == posterior.names
    for a, b in ((again.mean, posterior.mean), (again.variance, posterior.variance)):
        assert torch.equal(flat(a), flat(b))
    assert torch.equal(again.log_det_precision(), posterior.log_det_precision())


def test_what_does_not_fit_is_refused():
    generator = torch.Generator().manual_seed(0)
    layer = Layer("fc", (3, 4), generator)
    mean = layer.mean(generator)
    with pytest.raises(ShapeMismatch, match="other"):
        Kronecker(mean | {"other": torch.zeros(2)}, [layer.factors()])
    with pytest.raises(ShapeMismatch, match="twice"):
        Kronecker(mean, [layer.factors()], rest={"fc.bias": torch.zeros(3)})
    with pytest.raises(ShapeMismatch, match="must fit"):
        Kronecker(mean | {"fc.weight": torch.zeros(3, 3)}, [layer.factors()])
    with pytest.raises(ShapeMismatch, match="3 entries"):
        Kronecker(mean | {"fc.bias": torch.zeros(2)}, [layer.factors()])
    with pytest.raises(ValueError, match="damping"):
        Kronecker(mean, [layer.factors()], damping="square")
    with pytest.raises(ValueError, match="negative"):
        Kronecker(mean, [layer.factors()], -1.0)
    with pytest.raises(ShapeMismatch, match='"fc"'):
        Kronecker(mean, [layer.factors()], {"fcc": 1.0})
    with pytest.raises(ShapeMismatch, match="No prior precision"):
        Kronecker(mean, [layer.factors()], {"fc.weight": 1.0})
    with pytest.raises(ShapeMismatch, match="broadcast"):
        Kronecker(mean, [layer.factors()], {"fc.weight": torch.ones(2, 4), "fc.bias": 1.0})
    with pytest.raises(ValueError, match="outer product"):
        Kronecker(mean, [layer.factors()], {"fc.weight": torch.rand(3, 4) + 0.1, "fc.bias": 1.0})
    deficient = KroneckerFactors.of(
        "w", outputs=psd(2, generator=generator), inputs=psd(3, rank=1, generator=generator)
    )
    with pytest.raises(NotPositiveDefinite, match="singular"):
        Kronecker({"w": torch.zeros(2, 3)}, [deficient], 0.0)


@pytest.mark.parametrize("density", [0.8, 0.4])
def test_variances_of_a_random_part_of_the_weights(density):
    """Against dense inverses of random principal submatrices."""
    generator = torch.Generator().manual_seed(0)
    sizes, total, count = (12, 16), 0.0, 30
    roots = [torch.randn(n, n, generator=generator, dtype=torch.float64) for n in sizes]
    outputs, inputs = (root @ root.T for root in roots)
    factors = KroneckerFactors.of("w", outputs=outputs, inputs=inputs)
    block = Kronecker({"w": torch.zeros(sizes, dtype=torch.float64)}, [factors], 0.5).blocks[0]
    precision = torch.kron(outputs, inputs) + 0.5 * eye(12 * 16)
    assert torch.equal(block.variance_at(1.0), block.variance)
    estimate = block.variance_at(density).flatten().log()
    for _ in range(count):
        kept = torch.rand(12 * 16, generator=generator).argsort()[: round(density * 12 * 16)]
        exact = torch.linalg.inv(precision[kept][:, kept]).diagonal().log()
        total += float((exact - estimate[kept]).mean()) / count
    before = float((block.variance.log().flatten() - estimate).mean())
    assert before > 0.2  # variances shrink a lot,
    assert abs(total) < 0.1 * before + 0.02  # and the estimate knows by how much
