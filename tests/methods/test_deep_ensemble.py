"""Deep ensembles: members are networks trained by themselves, one after the other or abreast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError, ShapeMismatch, UnsupportedModel
from bayeslim.methods.shared.abreast import AbreastLoader, Stack
from bayeslim.methods.shared.particle_method import snapshot
from bayeslim.methods.shared.reinitialise import reinitialise_
from bayeslim.train.fit import fit
from bayeslim.train.seeding import seeded

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()


def outputs_of_particles(model, stack, x):
    """The outputs of particles by `predict`, (S, B, ...)."""
    bnn = bl.bayesianize(model, bl.DeepEnsemble(2), likelihood=bl.likelihoods.Gaussian())
    bnn.state["posterior"] = bl.posteriors.Particles(stack)
    return bl.predict(bnn, x).samples


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def loader(batch_size: int = 20) -> bl.data.Loader:
    return bl.data.Loader(X, Y, batch_size=batch_size)


def bayesian(method: bl.Method, model: nn.Module | None = None, **options) -> bl.Bayesian:
    options = {"likelihood": bl.likelihoods.Categorical(), "prior": bl.priors.Normal(0.7), **options}
    return bl.bayesianize(network() if model is None else model, method, **options)


def fitted(method: bl.Method, model: nn.Module | None = None, **options) -> bl.Bayesian:
    bnn = bayesian(method, model)
    bnn.fit(loader(), **{"epochs": 2, "lr": 0.05, "seed": 3, "progress": False, **options})
    return bnn


def assert_same(a: bl.Bayesian, b: bl.Bayesian, **tolerance) -> None:
    first, second = a.posterior_.tensors(), b.posterior_.tensors()
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], **tolerance)


@pytest.mark.parametrize("together", [True, False])
def test_members_differ_and_predict(together):
    bnn = fitted(bl.DeepEnsemble(3, together=together), epochs=15)
    q = bnn.posterior_
    assert q.count == 3
    assert all(q.variance[name].min() > 0 for name in q.names)
    prediction = bl.predict(bnn, X)
    assert prediction.samples.shape == (3, 60, 3)
    assert (prediction.classes == Y).float().mean() > 0.85
    assert torch.equal(bnn.eval()(X), prediction.samples[-1])


def test_a_member_is_the_network_trained_by_itself():
    """Each member is what the plain fit makes of the same start and the same order."""
    bnn = fitted(bl.DeepEnsemble(2, together=False))
    data = loader()
    for member in range(2):
        alone = bayesian(bl.DeepEnsemble())
        with seeded(3 + member * 1_000_003, 0, data):
            reinitialise_(alone.model)
            fit(alone, data, epochs=2, lr=0.05, progress=False)
        for name, value in alone.model.named_parameters():
            torch.testing.assert_close(bnn.posterior_.particle(member)[name], value.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("adversarial", [None, 0.1])
def test_abreast_every_member_is_as_alone(adversarial):
    method = bl.DeepEnsemble(3, adversarial=adversarial, together=True)
    bnn = bayesian(method)
    starts = []
    for seed in range(3):
        torch.manual_seed(seed)
        reinitialise_(bnn.model)
        starts.append(snapshot(bnn))
    bnn.state["posterior"] = bl.posteriors.Particles(
        {name: torch.stack([values[name] for values, _ in starts]) for name in starts[0][0]}
    )

    class Fixed(list):
        dataset = bl.data.Loader(X, Y).dataset

    batches = Fixed(bl.data.Loader(X, Y, 20, seed=7))
    result = bnn.fit(batches, epochs=3, lr=0.05, progress=False)
    assert len(result.history) == 3
    losses = []
    for member, (values, _) in enumerate(starts):
        alone = bayesian(bl.DeepEnsemble(adversarial=adversarial))
        with torch.no_grad():
            for name, value in values.items():
                alone.model.get_parameter(name).copy_(value)
        losses.append(fit(alone, batches, epochs=3, lr=0.05, progress=False).history[-1])
        for name, value in alone.model.named_parameters():
            torch.testing.assert_close(bnn.posterior_.particle(member)[name], value.detach(), rtol=1e-4, atol=1e-5)
    for key in ("nll", "kl", "loss"):
        assert result.history[-1][key] == pytest.approx(sum(each[key] for each in losses) / 3, rel=1e-4)


def test_abreast_with_batch_norms_and_dropout():
    bnn = fitted(bl.DeepEnsemble(3, together=True), normed())
    q = bnn.posterior_
    assert q.buffers["1.num_batches_tracked"].tolist() == [6, 6, 6]
    assert (q.buffers["1.running_mean"].std(0) > 0).all()
    for k, outputs in enumerate(bl.predict(bnn, X).samples):
        plain = normed()
        plain.load_state_dict(q.particle(k) | q.buffers_of(k))
        torch.testing.assert_close(outputs, plain.eval()(X))


def test_abreast_with_tied_weights():
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        return model

    bnn = fitted(bl.DeepEnsemble(3), tied(), epochs=5)
    q = bnn.posterior_
    assert "2.weight" not in q.names
    assert bnn.model[2].weight is bnn.model[0].weight
    for k, outputs in enumerate(bl.predict(bnn, X).samples):
        plain = tied()
        plain.load_state_dict(q.particle(k), strict=False)
        torch.testing.assert_close(outputs, plain.eval()(X))


def test_auto_is_together_where_nothing_needs_one_at_a_time(monkeypatch):
    used = []
    original = Stack.loss
    monkeypatch.setattr(Stack, "loss", lambda self, *a, **k: used.append(1) or original(self, *a, **k))

    class Custom(nn.Sequential):
        pass

    for model, options, together in (
        (network(), {}, True),
        (network(), {"clip": 1.0}, False),
        (network(), {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, False),
        (Custom(*network()), {}, False),
    ):
        used.clear()
        fitted(bl.DeepEnsemble(2), model, epochs=1, **options)
        assert bool(used) == together
    with pytest.raises(ValueError, match=r"together with clip=\.\.\."):
        fitted(bl.DeepEnsemble(2, together=True), clip=1.0)


@pytest.mark.parametrize("together", [True, False])
def test_every_member_has_an_order_of_its_own(together):
    seen = []

    class Watching(bl.data.Loader):
        def _order(self, epoch):
            order = super()._order(epoch)
            seen.append(order.tolist())
            return order

    bnn = bayesian(bl.DeepEnsemble(3, together=together))
    bnn.fit(Watching(X, Y, 20), epochs=1, progress=False)
    assert len(seen) == 3
    assert len({tuple(order) for order in seen}) == 3
    shuffled = DataLoader(TensorDataset(X, Y), batch_size=60, shuffle=True)
    (x, _) = next(iter(AbreastLoader([shuffled] * 3)))
    assert not torch.equal(x[0], x[1])
    torch.testing.assert_close(x[0].sum(0), x[1].sum(0))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_resume_is_exact(together, stop_after, tmp_path):
    method, options = bl.DeepEnsemble(2, together=together), {"epochs": 3, "seed": 5}
    whole = fitted(method, normed(), **options)

    class Stop(Exception):
        pass

    bnn, data = bayesian(method, normed()), loader()
    original, epochs = data._order, []

    def order(epoch):
        epochs.append(epoch)
        if len(epochs) > stop_after * (2 if together else 1):
            raise Stop
        return original(epoch)

    data._order = order
    try:
        bnn.fit(data, lr=0.05, progress=False, checkpoint=tmp_path / "run", **options)
    except Stop:
        pass
    else:
        assert together  # both members are in an epoch, so three are all
        assert stop_after >= 3
    again = bayesian(method, normed())
    result = again.fit(loader(), lr=0.05, progress=False, checkpoint=tmp_path / "run", **options)
    assert result.resumed_from == (min(stop_after, 3) if together else stop_after)
    assert_same(whole, again, rtol=0, atol=0)


@pytest.mark.parametrize("together", ["auto", True])
def test_a_checkpoint_of_members_one_by_one_is_gone_on_with_or_refused(together, tmp_path):
    options = {"epochs": 2, "lr": 0.05, "progress": False, "checkpoint": tmp_path, "seed": 5}
    bayesian(bl.DeepEnsemble(2)).fit(loader(), callbacks=[lambda _: None], **options)
    again = bayesian(bl.DeepEnsemble(2, together=together))
    if together is True:
        with pytest.raises(BayeslimError, match="trained one by one, and this run would train them together"):
            again.fit(loader(), **options)
        return
    assert again.fit(loader(), **options).resumed_from == 4
    assert not (tmp_path / "together").exists()


def test_a_checkpoint_of_members_together_is_not_begun_anew_one_by_one(tmp_path):
    options = {"epochs": 2, "lr": 0.05, "progress": False, "checkpoint": tmp_path, "seed": 5}
    whole = bayesian(bl.DeepEnsemble(2, together=True))
    whole.fit(loader(), **options)
    with pytest.raises(BayeslimError, match=r"trained together, .* one by one\. Use the same options"):
        bayesian(bl.DeepEnsemble(2)).fit(loader(), callbacks=[lambda _: None], **options)
    assert not any(tmp_path.glob("member-*"))
    again = bayesian(bl.DeepEnsemble(2, together=True))
    assert again.fit(loader(), **options).resumed_from == 2
    assert_same(whole, again, rtol=0, atol=0)


@pytest.mark.parametrize("method", [bl.DeepEnsemble(2), bl.SVGD(2), bl.HMC(samples=2, warmup=2)])
def test_no_examples_and_inputs_that_do_not_fit_are_named(method):
    options = {} if isinstance(method, bl.HMC) else {"epochs": 1}
    with pytest.raises(BayeslimError, match="The loader has no examples"):
        bayesian(method).fit([], progress=False, **options)
    wrong = bl.data.Loader(torch.randn(6, X.shape[1] + 1), Y[:6], 6)
    with pytest.raises(RuntimeError) as raised:
        bayesian(method).fit(wrong, progress=False, **options)
    assert any("The network was given inputs of" in note for note in raised.value.__notes__)


def test_a_batch_that_is_none_is_named_once():
    with pytest.raises(ShapeMismatch, match="A batch must be") as raised:
        bayesian(bl.DeepEnsemble(2)).loss("none")
    assert raised.value.__context__ is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_inputs_of_another_type_are_named(dtype):
    bnn = fitted(bl.DeepEnsemble(2), epochs=1)
    with pytest.raises(RuntimeError) as raised:
        bl.predict(bnn, X.to(dtype))
    (note,) = raised.value.__notes__
    assert str(dtype) in note
    assert "torch.float32. Give inputs such as its first layer takes" in note


def test_a_second_fit_goes_on_from_the_members():
    bnn = fitted(bl.DeepEnsemble(3, together=False), epochs=4)
    before = bnn.posterior_
    bnn.fit(loader(), epochs=1, lr=1e-6, progress=False)
    for name in before.names:
        torch.testing.assert_close(bnn.posterior_.values[name], before.values[name], rtol=0, atol=1e-4)
        assert not torch.equal(bnn.posterior_.values[name], before.values[name])


def test_a_failed_fit_leaves_the_posterior():
    bnn = fitted(bl.DeepEnsemble(2))
    before = bnn.posterior_
    with pytest.raises(TypeError):
        bnn.fit(loader(), nonsense=1)
    assert bnn.posterior_ is before


def test_a_learned_noise_is_each_members_own_and_then_their_mean():
    likelihood = bl.likelihoods.Gaussian("learned", initial_noise=1.0)
    bnn = bl.bayesianize(nn.Linear(3, 1), bl.DeepEnsemble(2), likelihood=likelihood)
    targets = X.sum(1, keepdim=True) + 0.5 * torch.randn(60, 1, generator=torch.Generator().manual_seed(2))
    seen = []
    data = bl.data.Loader(X, targets, 60)
    bnn.fit(
        data, epochs=40, lr=0.05, progress=False, callbacks=[lambda e: seen.append(e.bnn.likelihood.log_noise.item())]
    )
    assert seen[0] == pytest.approx(seen[40], abs=0.02)  # the second member starts from the beginning
    assert bnn.likelihood.log_noise.item() == pytest.approx((seen[39] + seen[79]) / 2, rel=1e-5)


def test_frozen_parameters_stay():
    model = normed()
    model[0].requires_grad_(False)
    body = copy.deepcopy(model[0].state_dict())
    bnn = fitted(bl.DeepEnsemble(2, together=False), model)
    assert "0.weight" not in bnn.posterior_.names
    assert all(torch.equal(body[n], v) for n, v in bnn.model[0].state_dict().items())
    assert bnn.posterior_.variance["4.weight"].min() > 0


def test_fresh_starts_of_attention_are_its_own():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(4, 2)
    nn.init.ones_(model.out_proj.bias)
    reinitialise_(model)
    assert model.out_proj.bias.abs().max() == 0  # as its constructor leaves it
    assert model.in_proj_weight.std() > 0


class Scaled(nn.Module):
    """A module with a parameter that has no known initialisation."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x * self.scale)


def test_modules_without_a_reset_need_a_function_that_makes_networks():
    bnn = bayesian(bl.DeepEnsemble(2), Scaled())
    with pytest.raises(UnsupportedModel, match=r'Scaled, which holds "scale", has no reset_parameters\(\)'):
        bnn.fit(loader(), epochs=1)
    bnn.fit(loader(), epochs=1, start=Scaled, progress=False)
    assert bnn.posterior_.variance["scale"].min() > 0
    with pytest.raises(ShapeMismatch, match="the same architecture"):
        bayesian(bl.DeepEnsemble(2)).fit(loader(), epochs=1, start=Scaled)
    with pytest.raises(TypeError, match="It made a int"):
        bayesian(bl.DeepEnsemble(2)).fit(loader(), epochs=1, start=lambda: 3)


def test_adversarial_loss_against_its_definition():
    bnn = bayesian(bl.DeepEnsemble(adversarial=0.2), num_data=60)
    x = X.clone().requires_grad_()
    plain = nn.functional.cross_entropy(bnn.model(x), Y)
    moved = X + 0.2 * torch.autograd.grad(plain, x, retain_graph=True)[0].sign()
    expected = 0.5 * (plain + nn.functional.cross_entropy(bnn.model(moved), Y))
    loss = bnn.loss((X, Y), kl_weight=0.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert expected > plain
    torch.testing.assert_close(
        torch.autograd.grad(loss, list(bnn.model.parameters())),
        torch.autograd.grad(expected, list(bnn.model.parameters())),
    )
    with torch.no_grad():
        assert bnn.loss((X, Y), kl_weight=0.0).item() == pytest.approx(expected.item(), rel=1e-6)
    words = bl.bayesianize(
        nn.Sequential(nn.Embedding(5, 3), nn.Flatten()),
        bl.DeepEnsemble(adversarial=0.1),
        likelihood=bl.likelihoods.Categorical(),
        num_data=4,
    )
    with pytest.raises(UnsupportedModel, match="needs floating-point inputs"):
        words.loss((torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "members must be"),
        ({"members": 2.5}, "members must be"),
        ({"adversarial": 0.0}, "must be positive"),
        ({"together": "yes"}, "together must be"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        bl.DeepEnsemble(**settings)


def test_an_optimizer_is_made_for_every_member():
    with pytest.raises(TypeError, match="its own optimizer"):
        fitted(bl.DeepEnsemble(2), optimizer=torch.optim.SGD(network().parameters(), lr=0.1))
    made = []
    fitted(bl.DeepEnsemble(2), optimizer=lambda p: made.append(torch.optim.SGD(p, lr=0.1)) or made[-1])
    assert len(made) == 2


def test_batches_of_unlike_shapes_are_refused_together():
    class Ragged(list):
        dataset = bl.data.Loader(X, Y).dataset
        turn = 0

        def __iter__(self):
            self.turn += 1
            return iter([(X[: 10 * self.turn], Y[: 10 * self.turn])])

    with pytest.raises(ShapeMismatch, match="together=False"):
        bayesian(bl.DeepEnsemble(2, together=True)).fit(Ragged([1]), epochs=1)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_a_fresh_start_reaches_weights_that_are_computed_by_an_old_norm(norm):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(30, 40)), nn.ReLU(), norm(nn.Conv1d(1, 2, 3)))
    model(torch.randn(5, 1, 30))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reinitialise_(model)
    assert all((tensor != before[name]).all() for name, tensor in model.state_dict().items())
    whole = dict(model.named_parameters())["0.weight_orig" if norm is nn.utils.spectral_norm else "0.weight_v"]
    assert whole.abs().max() <= 30**-0.5  # as Linear draws it
    if norm is nn.utils.weight_norm:
        torch.testing.assert_close(model[0].weight_g, whole.norm(dim=1, keepdim=True))
    model(torch.randn(5, 1, 30)).sum().backward()
    assert whole.grad is not None


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(
            nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)
        ),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)),  # by vmap: on (B, 2, 3), with a norm
        nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(6, 5)), nn.Sigmoid(), nn.Linear(5, 3)),  # nested: likewise
    ],
)
@pytest.mark.parametrize("examples", [1, 3, 7])
def test_every_particle_predicts_as_it_does_alone(model, examples):
    x = torch.randn(examples, 2, 3)
    stack = {name: torch.randn(4, *p.shape) for name, p in model.named_parameters()}
    found = outputs_of_particles(model.eval(), stack, x)
    for k in range(4):
        alone = functional_call(model, {name: value[k] for name, value in stack.items()}, (x,))
        torch.testing.assert_close(found[k], alone)
    some = dict(list(stack.items())[1:3])  # the rest is the model's own
    found = outputs_of_particles(model, some, x)
    for k in range(4):
        alone = functional_call(model, {name: value[k] for name, value in some.items()}, (x,))
        torch.testing.assert_close(found[k], alone)


def test_the_mean_of_many_inputs_is_that_of_the_networks():
    bnn = bl.bayesianize(nn.Linear(5, 64), bl.DeepEnsemble(5), likelihood=bl.likelihoods.Categorical())
    weights = {"weight": torch.randn(5, 64, 5), "bias": torch.randn(5, 64)}
    bnn.state["posterior"] = bl.posteriors.Particles(weights)
    x = torch.randn(14_000, 5)  # of which five are more than fit into what layers may give at once
    prediction = bl.predict(bnn, x, batch_size=None)
    expected = (torch.einsum("sci,bi->sbc", weights["weight"], x) + weights["bias"].unsqueeze(1)).softmax(-1).mean(0)
    torch.testing.assert_close(prediction.mean, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_particles_kept_in_another_precision_are_called_in_the_models_own(dtype):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(7, 3)
    stack = {name: torch.randn(5, *p.shape, dtype=dtype) for name, p in model.named_parameters()}
    found = outputs_of_particles(model, stack, x)
    assert found.dtype == torch.float32
    for k in range(5):
        alone = functional_call(model, {name: value[k].float() for name, value in stack.items()}, (x,))
        torch.testing.assert_close(found[k], alone)


@pytest.fixture
def kept():
    """Particles that have predicted once, with a check that each predicts as it does alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))
    bnn = bl.bayesianize(model, bl.DeepEnsemble(4), likelihood=bl.likelihoods.Gaussian())
    stack = {name: torch.randn(4, *p.shape) for name, p in model.named_parameters()}
    bnn.state["posterior"] = bl.posteriors.Particles(stack)
    x = torch.randn(7, 2, 3)

    def check(x=x, members=4, samples=None):
        posterior = bnn.posterior_
        own = next(bnn.model.parameters())
        for k, outputs in zip(posterior.spread(members), bl.predict(bnn, x.to(own), samples).samples, strict=True):
            alone = {name: value[k].to(own) for name, value in posterior.values.items()}
            torch.testing.assert_close(outputs, functional_call(bnn.model, alone, (x.to(own),)))

    check()
    return bnn, check


def test_predictions_see_particles_change_in_place(kept):
    bnn, check = kept
    bnn.posterior_.values["1.weight"].mul_(2)
    bnn.posterior_.values["5.bias"].add_(1)
    check()
    check(torch.randn(300, 2, 3))
    check(members=2, samples=2)
    check()


def test_predictions_see_other_tensors_layers_and_precisions(kept):
    bnn, check = kept
    bnn.posterior_.values["3.weight"] = torch.randn(4, 5, 8)
    check()
    bnn.model[2] = nn.Sigmoid()
    check()
    bnn.double()
    check()
    bnn.state["posterior"] = bl.posteriors.Particles({n: v.bfloat16() for n, v in bnn.posterior_.values.items()})
    check()
    bnn.posterior_.values["1.weight"].mul_(2)  # what had to be converted is not kept
    check()
    bnn.model[1].register_forward_hook(lambda module, args, output: output + 1)
    check()
    copied = copy.deepcopy(bnn)
    copied.posterior_.values["1.weight"].zero_()
    check()


def test_particles_of_tied_weights():
    layer = nn.Linear(3, 3)
    model, x = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(7, 3)
    stack = {name: torch.randn(4, *p.shape) for name, p in model.named_parameters()}
    found = outputs_of_particles(model, stack, x)
    for k in range(4):
        weight, bias = stack["0.weight"][k], stack["0.bias"][k]
        torch.testing.assert_close(found[k], (x @ weight.T + bias).tanh() @ weight.T + bias)


def test_networks_that_cannot_be_trained_abreast_say_so():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.inner(x)[0][:, -1])

    bnn = bl.bayesianize(Recurrent(), bl.DeepEnsemble(2, together=True), likelihood=bl.likelihoods.Gaussian(0.1))
    with pytest.raises(UnsupportedModel, match=r"Recurrent with .* cannot run under vmap.*together=False"):
        bnn.fit([(torch.randn(4, 5, 3), torch.randn(4, 1))], epochs=1, progress=False)


def test_adversarial_members_with_batch_norms_train_one_by_one():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    loader = [(torch.randn(8, 3), torch.randint(2, (8,)))]
    for together, refused in (("auto", False), (True, True)):
        method = bl.DeepEnsemble(members=2, adversarial=0.1, together=together)
        bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())
        if refused:
            with pytest.raises(ValueError, match="batch norms in adversarial training"):
                bnn.fit(loader, epochs=1, progress=False)
        else:
            assert {epoch["member"] for epoch in bnn.fit(loader, epochs=1, progress=False).history} == {1, 2}


def test_batch_norms_in_adversarial_training_are_not_compiled():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    bnn = bl.bayesianize(model, bl.DeepEnsemble(adversarial=0.1), likelihood=bl.likelihoods.Categorical(), num_data=8)
    with pytest.raises(bl.errors.UnsupportedModel, match="Batch norms in adversarial training cannot be compiled"):
        bnn.fit([], compile=True, progress=False)
