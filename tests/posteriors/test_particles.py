"""Particles: moments, drawing, conditioning, and predictions that use every one of them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, NotFitted, ShapeMismatch
from bayeslim.io.registry import registered, unregister
from bayeslim.methods.shared.particle_method import ParticleMethod, gathered, snapshot
from bayeslim.posteriors import Particles
from bayeslim.posteriors import particles as particles_module


@dataclass(frozen=True)
class Given(ParticleMethod):
    """A method whose particles a test puts in."""

    name: ClassVar[str] = "given"


def make(count=5, dtype=torch.float64) -> Particles:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (2, 3), "b": (4,), "scalar": ()}
    values = {n: torch.randn(count, *s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    buffers = {"norm.count": torch.arange(count), "norm.mean": torch.randn(count, 4, generator=generator)}
    return Particles({n: v.to(dtype) for n, v in values.items()}, buffers=buffers)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def ensemble(count=4) -> tuple[bl.Bayesian, list[nn.Module]]:
    """A network with particles, and the plain networks they are."""
    members = []
    for seed in range(count):
        torch.manual_seed(seed)
        member = network()
        member(torch.randn(50, 3) * (1 + seed))  # gives each a batch norm's statistics of its own
        members.append(member.eval())
    bnn = bl.bayesianize(network(), Given(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    snapshots = []
    for member in members:
        bnn.model.load_state_dict(member.state_dict())
        snapshots.append(snapshot(bnn))
    bnn.method.keep(bnn, gathered(snapshots))
    return bnn, members


def test_moments_against_their_definitions():
    q = make()
    assert q.count == 5
    assert q.names == ("a.weight", "b", "scalar")
    assert q.num_parameters == 11
    for name in q.names:
        each = torch.stack([q.particle(k)[name] for k in range(5)])
        mean = sum(each) / 5
        assert torch.allclose(q.mean[name], mean)
        assert torch.allclose(q.variance[name], sum((w - mean) ** 2 for w in each) / 4)
        assert torch.allclose(q.std[name], q.variance[name].sqrt())
    assert repr(q) == "Particles posterior over 11 weights in 3 parameters: 5 particles"


def test_one_particle_has_no_variance():
    q = make(1)
    assert all(torch.equal(q.mean[n], q.particle(0)[n]) for n in q.names)
    assert all(bool((v == 0).all()) for v in q.variance.values())


def test_half_precision_is_averaged_in_single():
    q = Particles({"w": torch.tensor([60000.0, 60000.0, 59968.0]).half().view(3, 1)})
    assert q.mean["w"].dtype == torch.float16
    assert torch.isfinite(q.mean["w"]).all()
    assert make(dtype=torch.bfloat16).variance["b"].dtype == torch.bfloat16


def test_the_mode_is_the_particle_nearest_to_the_mean():
    q = make(7)
    flat = torch.cat([q.values[n].reshape(7, -1) for n in q.names], 1)
    nearest = int((flat - flat.mean(0)).norm(dim=1).argmin())
    assert q.nearest_to_mean() == nearest
    assert all(torch.equal(q.mode[n], q.particle(nearest)[n]) for n in q.names)


def test_samples_are_particles_whole():
    q, n = make(), 4000
    draws = q.sample(n, generator=torch.Generator().manual_seed(1))
    which = (draws["scalar"].view(n, 1) == q.values["scalar"]).int().argmax(1)
    for name in q.names:
        assert torch.equal(draws[name], q.values[name][which])
    share = torch.bincount(which, minlength=5) / n
    assert ((share - 0.2).abs() < 5 * (0.2 * 0.8 / n) ** 0.5).all()
    assert {name: t.shape for name, t in q.sample().items()} == {name: t.shape for name, t in q.mean.items()}
    first, again = (q.sample(9, generator=torch.Generator().manual_seed(3))["b"] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(("n", "expected"), [(1, [2]), (2, [1, 3]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])])
def test_fewer_particles_are_spread_evenly(n, expected):
    assert make().spread(n) == expected
    assert make().spread(99) == list(range(5))


def test_there_is_no_density():
    q = make()
    with pytest.raises(BayeslimError, match="5 particles have no density"):
        q.log_prob(q.mean)


def test_conditioning_sets_zeros_and_leaves_the_rest():
    q = make()
    masks = {"b": torch.tensor([True, False, True, False])}
    cut = q.condition(masks)
    assert torch.equal(cut.values["b"], q.values["b"] * masks["b"])
    assert torch.equal(cut.values["a.weight"], q.values["a.weight"])
    assert torch.equal(cut.buffers["norm.mean"], q.buffers["norm.mean"])
    assert q.values["b"].abs().min() > 0
    with pytest.raises(ShapeMismatch, match=r'Closest names: "a\.weight"'):
        q.condition({"a.weigth": torch.ones(2, 3)})


def test_restore_builds_it_again():
    q = make()
    again = registered("posterior", q.kind).restore(q.config(), q.tensors())
    assert again.names == q.names
    assert all(torch.equal(again.values[n], v) for n, v in q.values.items())
    assert all(torch.equal(again.buffers[n], v) for n, v in q.buffers.items())


def test_particles_that_do_not_fit_are_refused():
    with pytest.raises(ShapeMismatch, match='"b" needs a value for each of 3 particles'):
        Particles({"a": torch.zeros(3, 2), "b": torch.zeros(2, 2)})
    with pytest.raises(ShapeMismatch, match='"running" needs'):
        Particles({"a": torch.zeros(3, 2)}, buffers={"running": torch.zeros(())})
    with pytest.raises(ShapeMismatch, match="at least one parameter"):
        Particles({})
    with pytest.raises(ShapeMismatch, match="Got 0"):
        Particles({"a": torch.zeros(0, 2)})


def test_buffers_are_copies():
    q = make()
    q.buffers_of(1)["norm.mean"].zero_()
    assert q.buffers["norm.mean"][1].abs().min() > 0


def test_prediction_uses_every_particle_once_with_its_own_buffers():
    bnn, members = ensemble()
    x = torch.randn(6, 3)
    expected = torch.stack([member(x) for member in members])
    assert torch.allclose(bl.predict(bnn, x).samples, expected, atol=1e-6)
    assert torch.allclose(bl.predict(bnn, x, batch_size=2).samples, expected, atol=1e-6)
    assert torch.equal(bl.predict(bnn, x, samples=99).samples, bl.predict(bnn, x).samples)
    assert torch.allclose(bl.predict(bnn, x, samples=2).samples, expected[[1, 3]], atol=1e-6)
    nearest = bnn.posterior_.nearest_to_mean()
    assert torch.allclose(bl.predict(bnn, x, how="map").samples[0], expected[nearest], atol=1e-6)


def test_more_particles_than_usual_are_all_used():
    bnn, _ = ensemble(count=40)
    assert bl.predict(bnn, torch.randn(2, 3)).samples.shape == (40, 2, 2)


def test_the_mean_is_the_mean_network():
    bnn, _ = ensemble()
    x = torch.randn(6, 3)
    assert torch.allclose(bl.predict(bnn, x, how="mean").samples[0], bnn.mean_network().eval()(x), atol=1e-6)
    assert torch.allclose(bl.predict(bnn, x, how="mean").samples[0], bnn.eval()(x), atol=1e-6)


def test_stored_in_half_precision_they_predict_in_the_networks_own():
    bnn, members = ensemble()
    x, q = torch.randn(6, 3), bnn.posterior_
    bnn.method.keep(bnn, Particles({n: v.bfloat16() for n, v in q.values.items()}, buffers=q.buffers))
    prediction = bl.predict(bnn, x)
    assert prediction.samples.dtype == torch.float32
    assert torch.allclose(prediction.samples, torch.stack([m(x) for m in members]), atol=0.1)


def test_a_draw_in_training_mode_leaves_the_particles_alone():
    bnn, _ = ensemble()
    before = bnn.posterior_.tensors()
    before = {n: t.clone() for n, t in before.items()}
    outputs = {
        bnn.train()(torch.randn(6, 3, generator=torch.Generator().manual_seed(0))).sum().item() for _ in range(40)
    }
    assert len(outputs) == 4
    assert all(torch.equal(t, before[n]) for n, t in bnn.posterior_.tensors().items())


def test_before_fit_there_is_the_network_alone():
    bnn = bl.bayesianize(network(), Given(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    x = torch.randn(6, 3)
    with pytest.raises(NotFitted, match="given is gathered"):
        _ = bnn.posterior_
    with pytest.raises(NotFitted):
        bl.predict(bnn, x)
    assert torch.equal(bl.predict(bnn, x, how="mean").samples[0], bnn.eval()(x))
    bnn, _ = ensemble()
    with pytest.raises(ValueError, match='how="sample"'):
        bl.predict(bnn, x, how="local")


def test_saved_and_loaded(tmp_path, request):
    bl.register("method")(Given)
    request.addfinalizer(lambda: unregister("method", "given"))
    bnn, _ = ensemble()
    x = torch.randn(6, 3)
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=network())
    assert again.posterior_.count == 4
    assert torch.equal(bl.predict(again, x).samples, bl.predict(bnn, x).samples)


def test_parameters_that_are_points_go_along():
    model = network()
    bnn = bl.bayesianize(model, Given(), likelihood=bl.likelihoods.Categorical(), sites=r"3\..*", num_data=10)
    bnn.model[1].weight.requires_grad_(False)
    values, rest = snapshot(bnn)
    assert set(values) == {"3.weight", "3.bias"}
    assert {"0.weight", "0.bias", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"} == set(rest)
    bnn.method.keep(bnn, gathered([(values, rest)]))
    mask = torch.rand(8, 3) > 0.5
    bnn.method.condition(bnn, {"0.weight": mask})
    assert torch.equal(bnn.posterior_.buffers["0.weight"][0], model[0].weight.detach() * mask)
    assert torch.equal(bnn.model[0].weight.detach(), model[0].weight.detach() * mask)


def test_prediction_puts_the_networks_own_weights_back_whatever_happens():
    bnn, _ = ensemble()
    x = torch.randn(6, 3)
    before = {name: tensor.clone() for name, tensor in bnn.model.state_dict().items()}
    loss = bnn.eval()(x).sum()  # waits for its backward pass
    bl.predict(bnn, x)
    loss.backward()
    assert bnn.model[0].weight.grad is not None
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError

    handle = bnn.model[3].register_forward_hook(fail)
    with pytest.raises(KeyError) as kept:  # which holds on to the frames
        bl.predict(bnn, x)
    handle.remove()
    assert all(torch.equal(before[name], tensor) for name, tensor in bnn.model.state_dict().items()), kept
    with torch.inference_mode():
        inside = bl.predict(bnn, x).samples
    assert torch.equal(inside, bl.predict(bnn, x).samples)
    assert all(torch.equal(before[name], tensor) for name, tensor in bnn.model.state_dict().items())


def test_recurrent_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.recur = nn.LSTM(4, 4, batch_first=True)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.recur(self.embed(tokens))[0][:, -1])

    members = [Tied() for _ in range(3)]
    bnn = bl.bayesianize(Tied(), Given(), likelihood=bl.likelihoods.Categorical(), num_data=10)
    snapshots = []
    for member in members:
        bnn.model.load_state_dict(member.state_dict())
        snapshots.append(snapshot(bnn))
    bnn.method.keep(bnn, gathered(snapshots))
    tokens = torch.randint(7, (5, 6))
    expected = torch.stack([member(tokens) for member in members]).detach()
    torch.testing.assert_close(bl.predict(bnn, tokens).samples, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_moments_are_found_stretch_by_stretch(dtype, monkeypatch):
    values = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:, 0, 0] = 0.3
    particles = Particles({"w": values, "scalar": values[:, 1, 1]})
    whole = [particles.mean, particles.std, particles.variance]
    nearest = particles.nearest_to_mean()
    monkeypatch.setattr(particles_module, "MAX_VALUES_PER_CHUNK", 13)
    for found, wanted in zip([particles.mean, particles.std, particles.variance], whole, strict=True):
        torch.testing.assert_close(found, wanted)
    assert particles.nearest_to_mean() == nearest
    precise = values.to(torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(particles.mean["w"], precise.mean(0).to(dtype))
    torch.testing.assert_close(particles.std["w"][1:], precise.std(0).to(dtype)[1:])
    assert particles.std["w"][0, 0] == 0
