import pytest
import torch
from dense_gaussians import Layer, eye, flat, network, random_masks
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.errors import ShapeMismatch
from bayeslim.posteriors import Dense, Diagonal, Kronecker, LowRank, group_saliency, saliency, slice_indices
from bayeslim.posteriors.saliency import UnitSaliency

PRIOR = {"fc.weight": 0.3, "fc.bias": 4.0, "conv": 2.0, "up": 1.1, "words": 0.2, "norm": 5.0}


def close(a, b, tolerance=1e-8):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def oracle(mean, covariance, group):
    """½ μ_Sᵀ Σ_SS⁻¹ μ_S from the dense covariance."""
    offset, places = 0, []
    for name, value in mean.items():
        if name in group:
            places.append(group[name] + offset)
        offset += value.numel()
    chosen = torch.cat(places)
    part = flat(mean)[chosen]
    return 0.5 * part @ torch.linalg.inv(covariance[chosen][:, chosen]) @ part


def units(mean):
    """Rows, columns, channels, several of each, parts of rows, and a unit that spans layers."""
    shape = {name: t.shape for name, t in mean.items()}
    yield {"fc.weight": slice_indices(shape["fc.weight"], 0, 1), "fc.bias": torch.tensor([1])}
    yield {"fc.weight": slice_indices(shape["fc.weight"], 0, [0, 3]), "fc.bias": torch.tensor([0, 3])}
    yield {"fc.weight": slice_indices(shape["fc.weight"], 0, 1)}
    yield {"fc.weight": slice_indices(shape["fc.weight"], 1, 2)}
    yield {"fc.weight": slice_indices(shape["fc.weight"], 1, [0, 4])}
    yield {"fc.weight": torch.tensor([0, 7, 13]), "fc.bias": torch.tensor([2])}
    yield {"conv.weight": slice_indices(shape["conv.weight"], 0, 3), "conv.bias": torch.tensor([3])}
    yield {"conv.weight": slice_indices(shape["conv.weight"], 1, 1)}
    yield {"up.weight": slice_indices(shape["up.weight"], 0, 2)}
    yield {"up.weight": slice_indices(shape["up.weight"], 1, 1)}
    yield {"words.weight": slice_indices(shape["words.weight"], 0, [2, 3])}
    yield {"words.weight": slice_indices(shape["words.weight"], 1, 1)}
    yield {
        "fc.weight": slice_indices(shape["fc.weight"], 0, 2),
        "fc.bias": torch.tensor([2]),
        "norm.weight": torch.tensor([1]),
        "conv.weight": slice_indices(shape["conv.weight"], 1, 0),
    }


@pytest.mark.parametrize("prior", [0.7, PRIOR], ids=["one", "many"])
def test_units_of_a_kronecker_posterior(prior):
    posterior, curvature = network(prior=prior)
    delta = torch.cat(
        [
            torch.full((t.numel(),), 0.7 if prior == 0.7 else PRIOR.get(n, PRIOR.get(n.rpartition(".")[0]))).double()
            for n, t in posterior.mean.items()
        ]
    )
    covariance = torch.linalg.inv(curvature + torch.diag(delta))
    groups = list(units(posterior.mean))
    wanted = torch.stack([oracle(posterior.mean, covariance, group) for group in groups])
    close(group_saliency(posterior, groups), wanted, 1e-6)


def test_units_of_the_other_families():
    kronecker, curvature = network()
    groups = list(units(kronecker.mean))
    covariance = torch.linalg.inv(curvature + 0.7 * eye(len(curvature)))
    wanted = torch.stack([oracle(kronecker.mean, covariance, group) for group in groups])
    close(group_saliency(Dense(kronecker.mean, curvature, 0.7), groups), wanted)
    values, vectors = torch.linalg.eigh(curvature)
    close(group_saliency(LowRank(kronecker.mean, vectors, values, 0.7), groups), wanted)
    std = {name: t.sqrt() for name, t in kronecker.variance.items()}
    independent = torch.stack([oracle(kronecker.mean, torch.diag(covariance.diagonal()), group) for group in groups])
    close(group_saliency(Diagonal(kronecker.mean, std), groups), independent)


def test_units_after_a_cut():
    base, curvature = network()
    masks = random_masks(base.mean, 0.7, torch.Generator().manual_seed(0))
    masks["fc.weight"][1] = True
    posterior = base.condition(masks, tolerance=1e-12)
    dense = Dense(base.mean, curvature, 0.7).condition(masks)
    groups = list(units(base.mean))
    close(group_saliency(posterior, groups), group_saliency(dense, groups), 1e-6)
    # what is cut already costs nothing
    gone = {"fc.weight": (~masks["fc.weight"]).flatten().nonzero()[:, 0]}
    close(group_saliency(posterior, [gone]), torch.zeros(1, dtype=torch.float64))


def test_single_weights_agree_with_the_marginal_rule():
    posterior, _ = network()
    groups = [{"fc.weight": torch.tensor([i])} for i in range(20)]
    close(group_saliency(posterior, groups), saliency(posterior)["fc.weight"].flatten(), 1e-6)


@pytest.mark.parametrize("prior", [0.7, PRIOR], ids=["one", "many"])
def test_rows_and_columns_that_cross_need_no_iteration(prior, monkeypatch):
    posterior, curvature = network(prior=prior)
    delta = {n: torch.full_like(t, 0.7 if prior == 0.7 else PRIOR.get(n, PRIOR.get(n.rpartition(".")[0])))
             for n, t in posterior.mean.items()}  # fmt: skip
    covariance = torch.linalg.inv(curvature + torch.diag(flat(delta)))
    shape = posterior.mean["fc.weight"].shape
    groups = []
    for rows, columns in (([1], [2]), ([0, 2], [1]), ([3], [0, 4]), ([0, 1, 3], [1, 2, 3])):
        lines = slice_indices(shape, 0, rows), slice_indices(shape, 1, columns)
        groups.append({"fc.weight": torch.cat(lines).unique(), "fc.bias": torch.tensor(rows)})
    wanted = torch.stack([oracle(posterior.mean, covariance, group) for group in groups])
    monkeypatch.setattr(UnitSaliency, "_any", lambda *_: pytest.fail("a recurrent unit took a solve of its own"))
    close(group_saliency(posterior, groups), wanted, 1e-8)


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 5),
    rank=st.integers(1, 5),
    prior=st.floats(0.05, 10),
    rows=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_rows_and_columns(outputs, inputs, rank, prior, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = Layer("fc", (outputs, inputs), generator, rank=rank, bias=False)
    posterior = Kronecker(layer.mean(generator), [layer.factors()], prior)
    covariance = torch.linalg.inv(layer.precision() + prior * eye(outputs * inputs))
    size = outputs if rows else inputs
    chosen = torch.randperm(size, generator=generator)[: 1 + seed % size]
    group = {"fc.weight": slice_indices((outputs, inputs), 0 if rows else 1, chosen)}
    close(group_saliency(posterior, [group])[0], oracle(posterior.mean, covariance, group), 1e-6)


def test_point_masses_are_priceless_unless_they_are_zero():
    mean = {"w": torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)}
    posterior = Dense(mean, eye(1) * 4, indices={"w": torch.tensor([2])})
    groups = [{"w": torch.tensor(index)} for index in ([0], [1], [2], [1, 2])]
    wanted = torch.tensor([torch.inf, 0.0, 8.0, 8.0], dtype=torch.float64)
    close(group_saliency(posterior, groups), wanted)
    kept = posterior.condition({"w": torch.tensor([True, True, True])})
    close(group_saliency(kept, groups), wanted)
    close(saliency(posterior)["w"], torch.tensor([torch.inf, 0.0, 8.0], dtype=torch.float64))


def test_what_does_not_fit_is_refused():
    posterior, _ = network()
    with pytest.raises(ShapeMismatch, match="fc"):
        group_saliency(posterior, [{"fc.weigth": torch.tensor([0])}])
    for bad in (torch.tensor([20]), torch.tensor([-1]), torch.tensor([0.5]), torch.ones(4, 5, dtype=torch.bool)):
        with pytest.raises(ShapeMismatch, match="0 to 19"):
            group_saliency(posterior, [{"fc.weight": bad}])
    with pytest.raises(TypeError, match="Gaussian"):
        group_saliency(object(), [])
    assert group_saliency(posterior, []).shape == (0,)
