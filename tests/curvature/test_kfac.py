import math

import pytest
import torch
from curved_networks import CASES, convolutional, make, mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import oracles
from bayeslim.curvature import kfac
from bayeslim.curvature.factors import LayerFactors
from bayeslim.curvature.patches import RowMoment, patches
from bayeslim.errors import NoSiteMatched, ShapeMismatch, UnsupportedModel
from bayeslim.likelihoods import Categorical, Gaussian

LAYERS = [
    (nn.Linear(3, 2), (4, 3)),
    (nn.Linear(3, 2, bias=False), (4, 2, 5, 3)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (3, 4, 11)),
    (nn.Conv1d(3, 2, 1), (3, 3, 4)),
    (nn.Conv2d(3, 4, 5, padding=2), (3, 3, 8, 8)),
    (nn.Conv2d(3, 4, 5, padding="same", padding_mode="circular"), (3, 3, 8, 8)),
    (nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode="reflect", bias=False), (3, 2, 6, 5)),
    (nn.Conv2d(3, 4, (5, 3), stride=(2, 1), dilation=(1, 2), padding=(1, 2)), (3, 3, 8, 8)),
    (nn.Conv2d(1, 2, 5), (3, 1, 6, 7)),
    (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 5, 5)),
    (nn.Conv3d(2, 4, 2, groups=2, padding=1), (3, 2, 3, 4, 3)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (3, 4, 5)),
    (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, dilation=2), (3, 2, 5, 4)),
    (nn.ConvTranspose2d(2, 3, (3, 1), stride=(1, 2), padding=(2, 0)), (3, 2, 5, 4)),
    (nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 2, 3, 2)),
    (nn.Embedding(7, 3), (5, 4)),
    (nn.Embedding(7, 3, padding_idx=1), (5, 4)),
]


def features_by_definition(layer: nn.Module, x: torch.Tensor, factors: LayerFactors) -> torch.Tensor:
    """Compute the features of every weight, (N, T, groups, I), from outputs of one-hot weights."""
    groups, outputs, inputs = factors.layer.size
    columns = []
    for i in range(inputs):
        matrix = torch.zeros(groups, outputs, inputs, dtype=torch.float64)
        matrix[..., i] = 1
        params = {name.rpartition(".")[2]: p for name, p in factors.layer.params(matrix).items()}
        out = functional_call(layer, params, (x,))
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            out = out * (x != layer.padding_idx).unsqueeze(-1)
        out = out if isinstance(layer, (nn.Linear, nn.Embedding)) else out.movedim(1, -1)
        columns.append(out.reshape(x.shape[0], -1, groups, outputs)[..., 0])
    return torch.stack(columns, -1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("layer", "shape"), LAYERS, ids=lambda v: str(v).replace(" ", "") if isinstance(v, nn.Module) else ""
)
def test_factors_of_every_layer_are_what_they_are_defined_as(layer, shape, sharing):
    layer = layer.double()
    x = torch.randint(0, 7, shape) if isinstance(layer, nn.Embedding) else torch.randn(shape, dtype=torch.float64)
    slopes = torch.randn(math.prod(layer(x).shape[1:]), 4, dtype=torch.float64)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(*slopes.shape, bias=False).double())
    model[2].weight.data = slopes.T.clone()
    y = torch.zeros(shape[0], 4)
    factors = kfac(
        model,
        [(x, y)],
        Gaussian(0.5),
        names=[name for name in oracles.parameter_names(model) if name.startswith("0.")],
        columns="exact",
        sharing=sharing,
    )
    found = factors.layers["0.weight"]
    a = features_by_definition(layer, x, found)
    groups, outputs, _ = found.layer.size
    g = slopes.T.reshape(4, *layer(x).shape[1:]) / 0.5  # the same for every example
    g = g if isinstance(layer, (nn.Linear, nn.Embedding)) else g.movedim(1, -1)
    g = g.reshape(4, -1, groups, outputs)
    examples, positions = a.shape[:2]
    if sharing == "expand":
        A = torch.einsum("ntgi,ntgj->gij", a, a) / (examples * positions)
        G = examples * torch.einsum("ktgo,ktgp->gop", g, g)
    else:
        A = torch.einsum("ngi,ngj->gij", a.mean(1), a.mean(1)) / examples
        G = examples * torch.einsum("kgo,kgp->gop", g.sum(1), g.sum(1))
    torch.testing.assert_close(found.G, G)
    torch.testing.assert_close(found.A, A.diagonal(dim1=1, dim2=2) if isinstance(layer, nn.Embedding) else A)
    assert factors.num_data == examples


def block(truth: torch.Tensor, model: nn.Module, factors: LayerFactors) -> torch.Tensor:
    """The layer's block of a matrix over all parameters, in the order of its matrix of weights and bias."""
    places, start = {}, 0
    for name, p in model.named_parameters():
        places[name] = torch.arange(start, start + p.numel()).view(p.shape)
        start += p.numel()
    order = factors.layer.matrix(places).flatten()
    return truth[order][:, order]


def product(factors: LayerFactors) -> torch.Tensor:
    A = factors.A if factors.A.ndim == 3 else torch.diag_embed(factors.A)
    return torch.block_diag(*(torch.kron(g, a) for g, a in zip(factors.G, A, strict=True)))


def test_exact_for_linear_regression():
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2)
    truth = oracles.ggn(model, [(x, y)], Gaussian(0.3))
    found = kfac(model, [(x[:4], y[:4]), (x[4:], y[4:])], Gaussian(0.3), columns="exact").layers["weight"]
    torch.testing.assert_close(product(found), block(truth, model, found), rtol=1e-10, atol=1e-10)


def test_exact_for_deep_linear_networks():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    batch = (torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2))
    truth = oracles.ggn(model, [batch], Gaussian(0.3))
    for found in kfac(model, [batch], Gaussian(0.3), columns="exact").layers.values():
        torch.testing.assert_close(product(found), block(truth, model, found), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("columns", ["exact", "empirical"])
def test_exact_for_a_single_example_without_sharing(columns):
    model, likelihood = mlp(), Categorical()
    batch = (torch.randn(1, 4, dtype=torch.float64), torch.tensor([1]))
    gradient = oracles.example_gradients(model, [batch], likelihood)[0]
    truth = oracles.ggn(model, [batch], likelihood) if columns == "exact" else torch.outer(gradient, gradient)
    factors = kfac(model, [batch], likelihood, columns=columns)
    assert len(factors.layers) == 2
    for found in factors.layers.values():
        torch.testing.assert_close(product(found), block(truth, model, found), rtol=1e-9, atol=1e-12)


def test_reduce_is_exact_for_a_mean_over_positions_of_one_example():
    class MeanPool(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2).double()

        def forward(self, x):
            return self.inner(x).mean(1)

    model, batch = MeanPool(), (torch.randn(1, 5, 3, dtype=torch.float64), torch.tensor([1]))
    truth = oracles.ggn(model, [batch], Categorical())
    reduce = kfac(model, [batch], Categorical(), columns="exact", sharing="reduce").layers["inner.weight"]
    expand = kfac(model, [batch], Categorical(), columns="exact").layers["inner.weight"]
    torch.testing.assert_close(product(reduce), block(truth, model, reduce))
    assert (product(expand) - block(truth, model, expand)).abs().max() > 0.01 * truth.abs().max()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["mlp", "convolutions and norms", "twice", "words", "segmentation"])
def test_minibatches_of_any_size_give_the_same(name, sharing):
    case = make(name)
    whole = kfac(case.model, case.batches(5), case.likelihood, columns="exact", sharing=sharing)
    split = kfac(case.model, case.batches(1, 3, 1), case.likelihood, columns="exact", sharing=sharing)
    assert whole.layers.keys() == split.layers.keys()
    assert split.num_data == 5
    for key, layer in whole.layers.items():
        torch.testing.assert_close(split.layers[key].A, layer.A)
        torch.testing.assert_close(split.layers[key].G, layer.G)


def spread(model, batches, likelihood, columns, draws):
    exact = kfac(model, batches, likelihood, columns="exact")
    key = next(iter(exact.layers))
    found = torch.stack([kfac(model, batches, likelihood, columns=columns, seed=s).layers[key].G for s in range(draws)])
    truth = exact.layers[key].G
    error = (found.mean(0) - truth) / (found.std(0) / draws**0.5 + 1e-9)
    return error.abs().max(), (found - truth).flatten(1).norm(dim=1).mean() / truth.norm()


@pytest.mark.parametrize(
    ("name", "columns"), [("mlp", "signs"), ("segmentation", "sampled"), ("words", "sampled"), ("sequence", "signs")]
)
def test_one_backward_is_unbiased(name, columns):
    case = make(name)
    error, noise = spread(case.model, case.batches(5), case.likelihood, columns, 100)
    assert error < 5
    assert noise > 0.01


def test_signs_vary_far_less_than_samples_on_a_confident_network():
    model = mlp()
    model[2].bias.data += torch.tensor([0.0, 0.0, 7.0])
    batch = (torch.randn(200, 4, dtype=torch.float64), torch.full((200,), 2))
    signs = spread(model, [batch], Categorical(), "signs", 20)[1]
    sampled = spread(model, [batch], Categorical(), "sampled", 20)[1]
    assert signs < 0.2 * sampled


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_factors_or_a_reason(name):
    case = make(name)
    factors = kfac(case.model, case.batches(), case.likelihood)
    named = [*factors.names, *factors.unsupported]
    assert sorted(named) == sorted(oracles.parameter_names(case.model))
    assert all(factors.unsupported.values())
    for parameter, value in factors.diagonal().items():
        assert value.shape == dict(case.model.named_parameters())[parameter].shape
        assert bool((value >= 0).all())


def test_what_hooks_cannot_tell_is_named_with_the_reason():
    reasons = {}
    for name in CASES:
        case = make(name)
        reasons[name] = kfac(case.model, case.batches(), case.likelihood).unsupported
    assert reasons["tied"] == {"table.weight": "is shared by 'table', 'head'"}
    assert reasons["read behind the back"] == {"table.weight": "is read by more than one module"}
    assert "never ran: another module reads it" in reasons["attention"]["encoder.self_attn.out_proj.weight"]
    assert reasons["attention"]["encoder.norm1.bias"] == "LayerNorm scales elementwise"
    assert not reasons["recurrent"]
    assert reasons["own parameter"] == {"scale": "OwnParameter may not be linear in it"}
    assert reasons["twice"] == {}


def test_a_layer_that_never_ran():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle, self.inner = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x)

    factors = kfac(Idle(), [(torch.randn(2, 4), torch.tensor([0, 1]))], Categorical())
    assert set(factors.layers) == {"inner.weight"}
    assert factors.unsupported == dict.fromkeys(("idle.weight", "idle.bias"), 'its layer "idle" never ran')
    assert "without idle.bias" in repr(factors)


def test_a_subclass_with_its_own_forward_is_not_taken_for_linear():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    factors = kfac(nn.Sequential(Scaled(4, 3)), [(torch.randn(2, 4), torch.tensor([0, 1]))], Categorical())
    assert set(factors.unsupported) == {"0.weight", "0.bias"}


def test_reduce_refuses_layers_without_examples_first():
    case = make("attention, time first")
    factors = kfac(case.model, case.batches(), case.likelihood, sharing="reduce")
    assert "examples in their first dimension" in factors.unsupported["encoder.linear1.weight"]
    assert "head.weight" in factors.layers


def test_names_choose_weights_and_biases():
    case = make("mlp")
    both = kfac(case.model, case.batches(), case.likelihood, columns="exact")
    weight = kfac(case.model, case.batches(), case.likelihood, columns="exact", names=["0.weight", "2.bias"])
    assert weight.layers["0.weight"].bias is None
    torch.testing.assert_close(weight.layers["0.weight"].A, both.layers["0.weight"].A[:, :-1, :-1])
    assert weight.unsupported == {"2.bias": "is a bias without its weight"}


def test_half_precision_gives_double_precision_factors():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    full = kfac(model, [(x, y)], Categorical(), columns="exact")
    for dtype in (torch.float16, torch.bfloat16):
        half = kfac(model.to(dtype), [(x.to(dtype), y)], Categorical(), columns="exact")
        for key, layer in half.layers.items():
            assert layer.A.dtype == layer.G.dtype == torch.float64
            torch.testing.assert_close(layer.G, full.layers[key].G, rtol=0.1, atol=0.1)


def test_float64_accumulation_by_default():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    wide = kfac(model, [(x, y)], Categorical(), columns="exact")
    truth = kfac(model.double(), [(x.double(), y)], Categorical(), columns="exact")
    for key, layer in wide.layers.items():
        assert layer.A.dtype == layer.G.dtype == torch.float64
        torch.testing.assert_close(layer.A, truth.layers[key].A, rtol=1e-5, atol=1e-6)


def test_dict_batches_and_a_missing_class():
    class Dicts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3).double()

        def forward(self, pixels, scale):
            return self.inner(pixels * scale)

    model, x = Dicts(), torch.randn(5, 4, dtype=torch.float64)
    batch = {"pixels": x, "scale": torch.tensor(2.0, dtype=torch.float64), "labels": torch.zeros(5, dtype=torch.long)}
    found = kfac(model, [batch], Categorical(), columns="exact").layers["inner.weight"]
    plain = kfac(nn.Sequential(model.inner), [(2 * x, batch["labels"])], Categorical(), columns="exact")
    torch.testing.assert_close(found.G, plain.layers["0.weight"].G)
    assert torch.linalg.matrix_rank(found.G[0]) == 2


def test_frozen_parameters_and_in_place_activations():
    case = make("convolutions and norms")
    free = kfac(case.model, case.batches(), case.likelihood, columns="exact")
    case.model.requires_grad_(False)
    names = oracles.parameter_names(case.model)
    frozen = kfac(case.model, case.batches(), case.likelihood, names=names, columns="exact")
    case.model[2] = nn.ReLU()
    plain = kfac(case.model, case.batches(), case.likelihood, names=names, columns="exact")
    for key, layer in free.layers.items():
        torch.testing.assert_close(frozen.layers[key].G, layer.G)
        torch.testing.assert_close(plain.layers[key].G, layer.G)
    with pytest.raises(NoSiteMatched, match="None of the 14 parameters of Sequential is trainable"):
        kfac(case.model, case.batches(), case.likelihood)


def test_the_users_own_hooks_come_after():
    model, batch = mlp(), (torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1]))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    unrolled = nn.Sequential(model[0], nn.Identity(), model[1], model[2])
    model[0]._forward_hooks.clear()
    unrolled[1].register_forward_hook(lambda module, args, output: output * 3)
    expected = kfac(unrolled, [batch], Categorical(), columns="exact").layers["0.weight"].G
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    torch.testing.assert_close(kfac(model, [batch], Categorical(), columns="exact").layers["0.weight"].G, expected)


def test_decomposed_factors_are_the_same_matrices():
    found = kfac(convolutional(), make("convolutions and norms").batches(), Categorical())
    for key, factors in found.decompose().items():
        torch.testing.assert_close(factors.inputs.matrix, found.layers[key].A)
        torch.testing.assert_close(factors.outputs.matrix, found.layers[key].G)


def test_bad_arguments():
    case = make("mlp")
    run = lambda **kwargs: kfac(case.model, case.batches(), case.likelihood, **kwargs)  # noqa: E731
    with pytest.raises(ValueError, match=r"columns must be one of signs, exact, sampled, empirical. Got 'all'"):
        run(columns="all")
    with pytest.raises(ValueError, match="sharing must be"):
        run(sharing="sum")
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64.* Got torch.float16"):
        run(dtype=torch.float16)
    with pytest.raises(ShapeMismatch, match="the loader yielded no batch"):
        kfac(case.model, iter([]), case.likelihood)
    with pytest.raises(UnsupportedModel, match=r'"1" normalises by the statistics of the batch even in eval mode'):
        kfac(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)), [], case.likelihood)


@settings(max_examples=20, deadline=None)
@given(
    channels=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    extra=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_products_of_rows_give_the_moment_of_patches(channels, kernel, stride, dilation, extra):
    height, width = (d * (k - 1) + 1 + e for d, k, e in zip(dilation, kernel, extra, strict=True))
    x = torch.randn(3, channels, height, width, dtype=torch.float64)
    rows = RowMoment((channels, height, width), kernel, stride, dilation, torch.float64, x.device)
    rows.add(x[:2])
    rows.add(x[2:])
    flat = patches(x, kernel, stride, dilation, 1).flatten(0, 2)
    moment, total = rows.result()
    torch.testing.assert_close(moment, flat.T @ flat)
    torch.testing.assert_close(total, flat.sum(0))
