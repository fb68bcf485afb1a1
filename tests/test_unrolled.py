"""Networks as rows: the same outputs to the bit, the same names, and the network itself where that is not sure."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayeslim as bl
from bayeslim import unrolled as module
from bayeslim.errors import ShapeMismatch
from bayeslim.unrolled import Graph, is_unrolled, unrolled
from oracles import checked_ensemble, particles_of


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"first": nn.Linear(12, 8), "last": nn.Linear(8, 3)})

    def forward(self, x):
        return self.layers["last"](F.dropout(F.relu(self.layers["first"](x.flatten(1))), training=self.training))


class Reading(Perceptron):
    """Has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x) / self.temperature


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.max_pool2d(self.features(x).tanh(), 1, stride=1)
        return self.head(x.view(x.size(0), -1))


class Shaped(Convolutions):
    def forward(self, x):
        batch = x.shape[0]
        return self.head(torch.reshape(F.leaky_relu(self.features(x), 0.2), (batch, -1)))


class Counted(Convolutions):
    def forward(self, x):
        return self.head(F.gelu(self.features(x)).view(-1, 4))


class Averaged(Convolutions):
    def forward(self, x):
        return self.head(F.avg_pool2d(self.features(x), 1).mean((2, 3)).clamp(min=0.1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = F.relu(self.norm(self.block(x)) + x, inplace=True)
        return self.head(torch.cat([y, x], 2).mean((2, 3))) * self.scale


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        return self.layer(self.layer(self.first(x.flatten(1)).relu()).relu())


class Unpacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        outputs, (last, _) = self.lstm(x.flatten(2))
        return self.head(outputs[:, -1] + last[0])


class Scaled(nn.Module):
    """Has parameters of its own, one of which is a layer's that is called as well."""

    def __init__(self):
        super().__init__()
        self.block = Reading()
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.block(x) + self.offset + self.block.layers["last"].bias


class Sliced(nn.Module):
    """Takes a part of a value; and a layer is called as a method is."""

    def __init__(self):
        super().__init__()
        self.size, self.relu = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.relu(self.size(x.flatten(2)[:, 1].clamp(-1, 1)).squeeze(-1))


ROWS = [Perceptron, Convolutions, Shaped, Counted, Averaged, Shared, Sliced]
GRAPHS = [Residual, Unpacking, Reading, Scaled]


def ready(make):
    torch.manual_seed(0)
    model = make()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return model.eval()


def tensors(model):
    return {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("make", ROWS + GRAPHS)
def test_rows_do_the_same_with_the_same_tensors(make):
    model, x = ready(make), torch.randn(9, 3, 2, 2)
    with torch.no_grad():
        found = unrolled(model, x)
        assert type(found) is (nn.Sequential if make in ROWS else Graph)
        assert is_unrolled(found)
        assert not is_unrolled(model)
        assert tensors(found) == tensors(model)
        torch.testing.assert_close(found(x), model(x), rtol=0, atol=0)
        assert unrolled(model, x) is found


@pytest.mark.parametrize("make", ROWS + GRAPHS)
@pytest.mark.parametrize("examples", [1, 40, 3_000])
def test_particles_say_what_each_says_alone(make, examples):
    _, check = checked_ensemble(ready(make), torch.randn(examples, 3, 2, 2), 3)
    for _ in range(2):
        check()


@pytest.mark.parametrize("method", [bl.Variational(), bl.Laplace(structure="diag")])
def test_drawn_networks_say_the_same_as_of_the_network_itself(method, monkeypatch):
    model, x = ready(Residual), torch.randn(64, 3, 2, 2)
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())
    batches = bl.data.Loader(x, torch.randint(3, (64,)), 32)
    bnn.fit(batches, progress=False, **({"epochs": 1} if method.name == "variational" else {}))

    def samples():
        return bl.predict(bnn, x, 4, how="sample", generator=torch.Generator().manual_seed(0)).samples

    found = samples()
    monkeypatch.setattr(module, "_rows_of", lambda _: None)
    module._seen.clear()
    torch.testing.assert_close(found, samples(), rtol=1e-4, atol=1e-5)


class Asking(Perceptron):
    """Depends on numbers."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Noisy(Perceptron):
    """Says something else every time."""

    def forward(self, x):
        return super().forward(x + torch.randn(1))


class Tossing(Perceptron):
    """What it does on the day that it is followed is not what it does later."""

    def forward(self, x):
        return super().forward(x) * (1 if random.random() < 0 or isinstance(x, torch.Tensor) else 2)


class Keeping(Perceptron):
    """Keeps what it is given, in an attribute, a list and a dictionary."""

    def __init__(self):
        super().__init__()
        self.last, self.all, self.by_name = None, [], {}

    def forward(self, x):
        self.last = x
        self.all.append(x)
        self.by_name["x"] = x
        return super().forward(x)


class Writing(Perceptron):
    """Has a buffer to write to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Several(Perceptron):
    """Takes more than one thing."""

    def forward(self, x, scale=None):
        return super().forward(x) if scale is None else super().forward(x) * scale


class Unused(Perceptron):
    """Has a layer that is not called."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(2, 2)


class Overwriting(Perceptron):
    """Changes what it is given."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class Dropping(Perceptron):
    """Drops values in evaluation mode, too."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


class Named(Perceptron):
    """Calls its layers by keyword."""

    def forward(self, x):
        return self.layers["last"](input=F.relu(input=self.layers["first"](input=x.flatten(1))))


@pytest.mark.parametrize("make", [Asking, Noisy, Tossing, Writing, Several, Unused, Dropping, Keeping])
def test_networks_that_cannot_be_followed_are_called_themselves(make):
    model, x = ready(make), torch.randn(9, 3, 2, 2)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert unrolled(model, x) is model
        assert unrolled(model, x) is model
    assert torch.equal(torch.get_rng_state(), state)
    if make is Writing:
        assert model.calls == 0


@pytest.mark.parametrize("make", [Keeping, Overwriting, Named])
def test_being_followed_leaves_nothing_behind(make):
    model, x = ready(make), torch.randn(9, 3, 2, 2)
    same, twin = x.clone(), copy.deepcopy(model)
    with torch.no_grad():
        found = unrolled(model, x)
        assert torch.equal(x, same)
        torch.testing.assert_close(found(x.clone()), twin(x.clone()), rtol=0, atol=0)
    if make is Keeping:
        assert not any(isinstance(thing, torch.fx.Proxy) for thing in (model.last, *model.all, *model.by_name.values()))


def test_what_a_forward_keeps_is_there_after_a_prediction():
    bnn = bl.bayesianize(ready(Keeping), bl.DeepEnsemble(3), likelihood=bl.likelihoods.Categorical())
    bnn.state["posterior"] = particles_of(bnn.model, 3)
    x = torch.randn(9, 3, 2, 2)
    bl.predict(bnn, x)
    assert bnn.model.last is x
    assert len(bnn.model.all) == 3


def test_networks_with_hooks_are_called_themselves():
    model, x = ready(Residual), torch.randn(9, 3, 2, 2)
    with torch.no_grad():
        assert unrolled(model, x) is not model
        handle = model.register_forward_hook(lambda *_: None)
        assert unrolled(model, x) is model
        handle.remove()
        assert unrolled(model, x) is not model
        with torch.autocast("cpu", torch.bfloat16):
            assert unrolled(model, x) is model


def test_what_is_changed_in_a_network_is_seen():
    model, x = ready(Residual), torch.randn(9, 3, 2, 2)
    with torch.no_grad():
        first = unrolled(model, x)
        for change in (
            lambda: setattr(model, "scale", 2.0),
            lambda: setattr(model, "norm", nn.Identity()),
            lambda: model.block.append(nn.Conv2d(4, 4, 1)),
            lambda: setattr(model.stem, "padding", (1, 1)) or setattr(model.block[0], "stride", (1, 1)),
        ):
            change()
            torch.testing.assert_close(unrolled(model, x)(x), model(x), rtol=0, atol=0)
    assert unrolled(model, x) is not first


def test_inputs_of_another_shape_are_compared_anew():
    """Rows of four numbers are those of one example for the first shape only."""
    model = ready(Counted)
    with torch.no_grad():
        assert unrolled(model, torch.randn(9, 3, 2, 2)) is not model
        assert unrolled(model, torch.randn(9, 3, 3, 2)) is model
        assert unrolled(model, torch.randn(9, 3, 2, 2)) is not model


def test_a_transformer_is_made_of_rows_and_says_what_is_too_long():
    model, x = bl.zoo.transformer(length=5, features=4).eval(), torch.randn(3, 5, 4)
    with torch.no_grad():
        found = unrolled(model, x)
        assert isinstance(found, Graph)
        assert tensors(found) == tensors(model)
        torch.testing.assert_close(found(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(found(x[:, :2]), model(x[:, :2]), rtol=0, atol=0)
        with pytest.raises(ShapeMismatch, match="has 5 positions"):
            found(torch.randn(3, 6, 4))


def test_inputs_that_are_no_tensor_are_for_the_network_itself():
    model = ready(Perceptron)
    assert unrolled(model, (torch.randn(9, 12),)) is model
    assert unrolled(model, {"x": torch.randn(9, 12)}) is model


def test_wrong_inputs_are_told_as_by_the_network():
    bnn = bl.bayesianize(ready(Perceptron), bl.DeepEnsemble(3), likelihood=bl.likelihoods.Categorical())
    bnn.state["posterior"] = particles_of(bnn.model, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        bl.predict(bnn, torch.randn(5, 11))
