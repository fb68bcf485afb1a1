"""Batch statistics and augmentation as noise at test time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError, NotFitted, ShapeMismatch, UnsupportedModel
from bayeslim.methods.shared.batch_statistics import measure_again_

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
IMAGES = torch.rand(6, 1, 5, 5, generator=torch.Generator().manual_seed(2)) + 1


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def bayesian(method: bl.Method, model: nn.Module) -> bl.Bayesian:
    return bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())


def batches() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=20)


def test_particles_are_one_network_with_the_statistics_of_a_minibatch_each():
    bnn = bayesian(bl.MCBatchNorm(samples=5), network())
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    bnn.fit(batches())
    assert all(torch.equal(before[name], value) for name, value in bnn.state_dict().items())
    q = bnn.posterior_
    assert q.count == 5
    assert bnn.num_data == 60
    for k in range(5):
        hidden = nn.functional.linear(X[20 * (k % 3) :][:20], before["0.weight"], before["0.bias"])
        torch.testing.assert_close(q.buffers_of(k)["1.running_mean"], hidden.mean(0))
        torch.testing.assert_close(q.buffers_of(k)["1.running_var"], hidden.var(0))
        assert all(torch.equal(q.particle(k)[name], before[name]) for name in q.names)
    samples = bl.predict(bnn, X).samples
    assert samples.shape[0] == 5
    own = network().eval()
    own.load_state_dict(before | q.buffers_of(1))
    torch.testing.assert_close(samples[1], own(X))
    assert not torch.allclose(samples[0], samples[1])
    assert bnn.model[1].momentum == 0.1


def test_it_trains_first_where_asked():
    bnn = bayesian(bl.MCBatchNorm(samples=2), network())
    result = bnn.fit(batches(), epochs=2, lr=0.01, seed=1, progress=False)
    assert len(result.history) == 2
    assert all(torch.equal(bnn.posterior_.particle(1)[name], p) for name, p in bnn.model.named_parameters())
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), criterion="magnitude")
    assert all((pruned.posterior_.particle(1)[name][~mask] == 0).all() for name, mask in pruned.masks.items())


def test_what_batch_norm_noise_needs():
    with pytest.raises(UnsupportedModel, match="needs batch norms that keep statistics"):
        bayesian(bl.MCBatchNorm(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="samples must be"):
        bl.MCBatchNorm(samples=0)
    bnn = bayesian(bl.MCBatchNorm(), network())
    with pytest.raises(NotFitted):
        bnn.posterior_  # noqa: B018
    with pytest.raises(TypeError, match="lr are options of training"):
        bnn.fit(batches(), lr=0.1)
    with pytest.raises(BayeslimError, match="no batches"):
        bnn.fit([])


@pytest.mark.parametrize("first", [False, True])
def test_batches_of_one_row_are_not_measured(first):
    bnn, whole = bayesian(bl.MCBatchNorm(samples=4), network()), bayesian(bl.MCBatchNorm(samples=4), network())
    whole.model.load_state_dict(bnn.model.state_dict())
    pairs, alone = [(X[:20], Y[:20]), (X[20:40], Y[20:40])], [(X[40:41], Y[40:41])]
    bnn.fit(alone + pairs if first else pairs + alone)
    whole.fit(pairs)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(bnn.posterior_.buffers[name], whole.posterior_.buffers[name])
    with pytest.raises(BayeslimError, match="the batches of the loader have one row each"):
        bnn.fit(alone)


def test_one_image_has_statistics_of_its_own():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 2))
    bnn = bayesian(bl.MCBatchNorm(samples=3), model)
    bnn.fit([(IMAGES[k : k + 1], Y[k : k + 1]) for k in range(3)])
    assert float(bnn.posterior_.buffers["1.running_mean"].std(0).min()) > 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_statistics_measured_again_leave_single_rows_out(place):
    model = network()
    pairs = [(X[:20], Y[:20]), (X[20:40], Y[20:40])]
    measure_again_(model, [*pairs[:place], (X[40:41], Y[40:41]), *pairs[place:]])
    hidden = [model[0](x) for x, _ in pairs]
    torch.testing.assert_close(model[1].running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
    with pytest.raises(BayeslimError, match="one row each"):
        measure_again_(model, [(X[:1], Y[:1])])


class Pixels(nn.Module):
    """A network that returns its input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.flatten(1)


def seen(method: bl.Method, x: torch.Tensor, n: int, how: str = "sample", **options) -> torch.Tensor:
    bnn = bl.bayesianize(Pixels(), method, likelihood=bl.likelihoods.Gaussian(1.0), num_data=6)
    return bl.predict(bnn, x, samples=n, how=how, generator=torch.Generator().manual_seed(0), **options).samples


def test_noise_has_its_standard_deviation_in_every_input():
    found = seen(bl.MCAugmentation(noise=0.2), X, 4000)
    torch.testing.assert_close(found.mean(0), X, atol=0.02, rtol=0)
    torch.testing.assert_close(found.std(0), torch.full_like(X, 0.2), atol=0.02, rtol=0)


def shifted(image: torch.Tensor, right: int, down: int) -> torch.Tensor:
    moved = torch.zeros_like(image)
    for i in range(5):
        for j in range(5):
            if 0 <= i - down < 5 and 0 <= j - right < 5:
                moved[..., i, j] = image[..., i - down, j - right]
    return moved


@pytest.mark.parametrize("how", ["sample", "local"])
def test_images_are_shifted_and_mirrored_as_said(how):
    found = seen(bl.MCAugmentation(shift=1, flip=True), IMAGES, 400, how).view(400, 6, 1, 5, 5)
    allowed = torch.stack([shifted(IMAGES, right, down) for right in (-1, 0, 1) for down in (-1, 0, 1)])
    allowed = torch.cat([allowed, allowed.flip(-1)])  # (18, 6, 1, 5, 5)
    hits = (found[:, None] == allowed).flatten(3).all(-1)  # (400, 18, 6)
    assert (hits.sum(1) == 1).all()
    which = hits.int().argmax(1)
    assert bool((which == which[:, :1]).all()) == (how == "sample")
    shares = hits[..., 0].float().mean(0)
    assert ((shares - 1 / 18).abs() < 0.04).all()


def test_what_augmentation_needs():
    with pytest.raises(ShapeMismatch, match="shift and flip are for images"):
        seen(bl.MCAugmentation(flip=True), X, 1)
    with pytest.raises(ValueError, match="needs a transformation"):
        bl.MCAugmentation()
    with pytest.raises(ValueError, match="noise is a standard deviation"):
        bl.MCAugmentation(noise=-1.0)
    with pytest.raises(ValueError, match="shift is a whole number"):
        bl.MCAugmentation(shift=-1)


def test_other_inputs_are_left_alone():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            assert index.dtype == torch.int64
            return self.scale * (x + index)

    bnn = bl.bayesianize(Two(), bl.MCAugmentation(noise=0.1), likelihood=bl.likelihoods.Gaussian(1.0), num_data=6)
    inputs = {"x": X, "index": torch.arange(3).expand(60, 3)}
    assert not torch.equal(bl.predict(bnn, inputs, samples=1).samples[0], X + inputs["index"])
    assert torch.equal(bl.predict(bnn, inputs, how="mean").samples[0], X + inputs["index"])
