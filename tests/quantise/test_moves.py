"""Survivors move to their conditional mean: against conditioning written out, one weight at a time."""

import pytest
import torch

import bayeslim as bl
from bayeslim.posteriors import Dense, Diagonal, Kronecker, LowRank, LowRankCovariance
from bayeslim.posteriors.precision import precision_diagonal
from bayeslim.quantise.fitting import fit_uniform
from bayeslim.quantise.moves import Rounding, _in_parts, round_jointly, round_rows
from bayeslim.quantise.weights import Weights
from prune.given_posteriors import covariance_of, dense, flat, given, kronecker, mean_of, two_layers


def low_rank(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    mean = mean_of(model)
    size = sum(m.numel() for m in mean.values())
    factor = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return LowRank(mean, factor, torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64), 0.7)


def low_rank_covariance(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    mean = mean_of(model)
    std = {n: torch.rand(m.shape, generator=generator, dtype=torch.float64) + 0.1 for n, m in mean.items()}
    factor = {n: 0.3 * torch.randn(3, *m.shape, generator=generator, dtype=torch.float64) for n, m in mean.items()}
    return LowRankCovariance(mean, std, factor)


CORRELATED = {
    "dense": dense,
    "kronecker": kronecker,
    "low rank": low_rank,
    "low-rank covariance": low_rank_covariance,
    "conditioned": lambda model: kronecker(model).condition({"0.weight": torch.arange(30).reshape(6, 5) % 3 > 0}),
}


def task_of(posterior, bits=3, strength=0.0):
    """Everything that is not zero, to be rounded to a grid a parameter."""
    precision = precision_diagonal(posterior)
    mean, kept, sharp, rounders = {}, {}, {}, {}
    for name, value in posterior.mean.items():
        weights = Weights.of(value, precision[name].where(value != 0, 1.0), value != 0, False)
        _, rounder, _ = fit_uniform(weights, torch.tensor([bits]), strength)
        mean[name], kept[name] = value.flatten().double(), value.flatten() != 0
        sharp[name], rounders[name] = precision[name].flatten(), rounder.flat(value.shape)
    return Rounding(mean, kept, sharp, rounders, {n: v.shape for n, v in posterior.mean.items()})


def one_by_one(task, precision, names, order):
    """Round in an order; after every weight all free ones go where Σ_RS Σ_SS⁻¹ sends them. Slow, by inverses."""
    mean = torch.cat([task.mean[n] for n in names])
    scale = torch.cat([task.rounders[n].scale.double().expand(task.mean[n].shape) for n in names])
    limit = int(next(iter(task.rounders.values())).limit.max())
    fixed = ~torch.cat([task.kept[n] for n in names])
    rounded = torch.zeros_like(mean)
    for place in order:
        free = ~fixed
        current = mean.clone()
        sigma = torch.linalg.inv(precision)
        if bool(fixed.any()):
            gain = sigma[free][:, fixed] @ torch.linalg.inv(sigma[fixed][:, fixed])
            current[free] = mean[free] - gain @ (mean - rounded)[fixed]
        rounded[place] = (current[place] / scale[place]).round().clamp(-limit, limit) * scale[place]
        fixed[place] = True
    return rounded


def levels(task, codes):
    return {n: task.rounders[n].levels(c).double() for n, c in codes.items()}


def precision_matrix(posterior):
    return torch.linalg.inv(covariance_of(posterior))


@pytest.mark.parametrize("family", ["dense", "kronecker", "conditioned"])
def test_weight_by_weight_is_conditioning_on_every_rounded_weight(family):
    posterior = CORRELATED[family](two_layers())
    base = getattr(posterior, "base", posterior)
    task = task_of(posterior)
    codes = round_jointly(posterior, task, 3)
    precision = precision_matrix(base)
    names = list(posterior.mean)
    kept = torch.cat([task.kept[n] for n in names])
    order = precision.diagonal().masked_fill(~kept, -1).argsort(descending=True)[: int(kept.sum())]
    if family == "dense":
        wanted = one_by_one(task, precision, names, order)
        assert torch.allclose(flat(levels(task, codes)), wanted, atol=1e-9)
        return
    # Layers are independent: each in its own order.
    layers = [[n for n in names if n.startswith(start)] for start in ("0.", "2.")]
    size = task.mean["0.weight"].numel() + task.mean["0.bias"].numel()
    for part, own in ((slice(0, size), layers[0]), (slice(size, None), layers[1])):
        inside = torch.cat([task.kept[n] for n in own])
        order = precision[part, part].diagonal().masked_fill(~inside, -1).argsort(descending=True)[: int(inside.sum())]
        wanted = one_by_one(task, precision[part, part], own, order)
        assert torch.allclose(torch.cat([levels(task, codes)[n] for n in own]), wanted, atol=1e-9)


@pytest.mark.parametrize("family", ["kronecker", "low rank", "low-rank covariance"])
def test_as_many_parts_as_weights_are_weight_by_weight(family):
    posterior = CORRELATED[family](two_layers())
    task = task_of(posterior)
    task = Rounding(
        task.mean,
        {n: k & (n == "0.weight") for n, k in task.kept.items()},  # one parameter, as parts go through all at once
        task.precision,
        {"0.weight": task.rounders["0.weight"]},
        task.shapes,
    )
    codes = _in_parts(posterior, task, 30)
    precision = precision_matrix(posterior)[:30, :30]
    order = task.precision["0.weight"].argsort(descending=True)
    wanted = one_by_one(task, precision, ["0.weight"], order)
    assert torch.allclose(task.rounders["0.weight"].levels(codes["0.weight"]).double(), wanted, atol=1e-6)


def test_rows_are_exact_where_outputs_are_uncorrelated():
    model = two_layers()
    full = kronecker(model)
    factors = []
    for factor in full.factors:
        diagonal = torch.diag(factor.outputs.matrix[0].diagonal())
        factors.append(
            bl.posteriors.KroneckerFactors.of(
                factor.weight, outputs=diagonal, inputs=factor.inputs.matrix, bias=factor.bias
            )
        )
    posterior = Kronecker(full.mean, factors, 0.5)
    task = task_of(posterior)
    codes = round_rows(posterior, task)
    precision = precision_matrix(posterior)[:36, :36]
    rows = torch.cat([torch.arange(30).reshape(6, 5), torch.arange(30, 36)[:, None]], 1)
    rounded = flat({n: levels(task, codes)[n] for n in ("0.weight", "0.bias")})
    for row in rows:
        own = precision[row][:, row]
        mean = torch.cat([task.mean["0.weight"], task.mean["0.bias"]])[row]
        scale = torch.tensor([float(task.rounders["0.weight"].scale)] * 5 + [float(task.rounders["0.bias"].scale)])
        wanted, fixed = torch.zeros(6).double(), torch.zeros(6, dtype=torch.bool)
        for place in range(5, -1, -1):  # from the last to the first
            free, current = ~fixed, mean.clone()
            if bool(fixed.any()):
                pull = own[free][:, fixed] @ (mean - wanted)[fixed]
                current[free] = mean[free] + torch.linalg.solve(own[free][:, free], pull)
            wanted[place] = (current[place] / scale[place]).round().clamp(-3, 3) * scale[place]
            fixed[place] = True
        assert torch.allclose(rounded[row], wanted, atol=1e-6)


@pytest.mark.parametrize("family", CORRELATED)
def test_moving_loses_less_and_the_loss_is_the_quadratic(family):
    model = two_layers()
    posterior = CORRELATED[family](model)
    bnn = given(model, posterior)
    moved = bl.quantise(bnn, bits=3, strength=0.0)
    stayed = bl.quantise(bnn, bits=3, strength=0.0, move=None)
    assert moved.expected_loss < stayed.expected_loss
    rounded = {n: p.detach() for n, p in moved.network.named_parameters()}
    assert moved.expected_loss == pytest.approx(0.5 * float(posterior.quadratic(rounded)), rel=1e-5)


@pytest.mark.parametrize("family", [n for n in CORRELATED if n != "conditioned"])
def test_what_rounding_pays_is_the_diagonal_of_the_precision(family):
    posterior = CORRELATED[family](two_layers())
    assert torch.allclose(flat(precision_diagonal(posterior)), precision_matrix(posterior).diagonal(), rtol=1e-6)


def test_a_conditioned_posterior_knows_its_zeros_for_certain():
    posterior = CORRELATED["conditioned"](two_layers())
    precision, masks = precision_diagonal(posterior), posterior.masks
    for name, mask in masks.items():
        assert bool(precision[name][~mask].isinf().all())
        assert torch.equal(precision[name][mask], precision_diagonal(posterior.base)[name][mask])


def test_a_subnetwork_rounds_its_fixed_weights_to_the_nearest():
    model = two_layers()
    mean = mean_of(model)
    chosen = torch.tensor([0, 3, 7, 11])
    posterior = Dense(mean, torch.eye(4).double() * 50, indices={"0.weight": chosen})
    found = bl.quantise(given(model, posterior), bits=4, strength=0.0)
    assert set(found.codes) == set(mean)
    scale = float(found.grids["0.weight"].scale)
    wanted = (mean["0.weight"] / scale).round().clamp(-7, 7)
    assert torch.equal(found.codes["0.weight"].double(), wanted)


def test_nothing_moves_where_weights_are_independent():
    model = two_layers()
    posterior = Diagonal(mean_of(model), {n: torch.full_like(m, 0.1) for n, m in mean_of(model).items()})
    joint, none = (bl.quantise(given(model, posterior), bits=3, move=move) for move in ("joint", None))
    assert all(torch.equal(joint.codes[n], none.codes[n]) for n in joint.codes)
