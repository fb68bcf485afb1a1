"""What a forward reads besides its arguments: predictions see when it changes, wherever it is."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from bayeslim import belongings as module
from bayeslim.belongings import Belongings
from bayeslim.unrolled import is_unrolled, unrolled
from oracles import checked_ensemble

SCALE, SCALES = 1.0, {"of": {"all": 1.0}}
elsewhere = ModuleType("elsewhere")
elsewhere.SCALE = 1.0


@dataclass
class Settings:
    scale: float = 1.0
    scales: list[float] = field(default_factory=lambda: [1.0])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Net(nn.Module):
    """Two layers, and a factor that is read in some way."""

    factor = 1.0

    def __init__(self, read=None, settings=None):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.read, self.settings = read, settings

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) * (self.factor if self.read is None else self.read(self)))


def of_settings(net):
    return net.settings.scale


def in_turn(net):
    return of_a_variable(net)


def of_a_variable(_):
    return SCALE


def enclosed():
    scale = 1.0

    def read(_):
        return scale

    def change():
        nonlocal scale
        scale = 5.0

    return read, change


def times(scales, _):
    return scales[0]


def set_in(things, name):
    return lambda *_: setattr(things, name, 5.0)


def cases():
    kept, (read, change) = [1.0], enclosed()
    yield "namespace", Net(of_settings, SimpleNamespace(scale=1.0)), lambda net: setattr(net.settings, "scale", 5.0)
    yield "arguments", Net(of_settings, Namespace(scale=1.0)), lambda net: setattr(net.settings, "scale", 5.0)
    yield "dataclass", Net(of_settings, Settings()), lambda net: setattr(net.settings, "scale", 5.0)
    yield "slots", Net(of_settings, Slotted()), lambda net: setattr(net.settings, "scale", 5.0)
    yield (
        "list in an object",
        Net(lambda net: net.settings.scales[0], Settings()),
        lambda net: net.settings.scales.__setitem__(0, 5.0),
    )
    yield (
        "object in a tuple",
        Net(lambda net: net.settings[0].scale, (Settings(),)),
        lambda net: setattr(net.settings[0], "scale", 5.0),
    )
    yield "class", Net(), set_in(Net, "factor")
    yield (
        "class of settings",
        Net(lambda net: net.settings.scale, type("Own", (), {"scale": 1.0})()),
        (lambda net: setattr(type(net.settings), "scale", 5.0)),
    )
    yield "variable", Net(of_a_variable), set_in(sys.modules[__name__], "SCALE")
    yield "variable of a function in a function", Net(in_turn), set_in(sys.modules[__name__], "SCALE")
    yield "within a variable", Net(lambda _: SCALES["of"]["all"]), lambda _: SCALES["of"].update(all=5.0)
    yield "imported", Net(lambda _: elsewhere.SCALE), set_in(elsewhere, "SCALE")
    yield "enclosed", Net(read), lambda _: change()
    yield "partial", Net(partial(times, kept)), lambda net: net.read.args[0].__setitem__(0, 5.0)
    yield "default", Net(lambda _, scales=kept: scales[0]), lambda _: kept.__setitem__(0, 5.0)


@pytest.mark.parametrize("case", [name for name, *_ in cases()])
def test_what_a_forward_reads_is_seen_to_change(case, monkeypatch):
    for things, name in ((Net, "factor"), (sys.modules[__name__], "SCALE"), (elsewhere, "SCALE")):
        monkeypatch.setattr(things, name, 1.0)
    monkeypatch.setitem(SCALES["of"], "all", 1.0)
    net, change = next((net, change) for name, net, change in cases() if name == case)
    torch.manual_seed(0)
    x = torch.randn(7, 6)
    bnn, check = checked_ensemble(net, x)
    model = bnn.model
    check()
    check()
    assert is_unrolled(unrolled(model.eval(), x)) == (case != "slots")
    before = model(x)
    change(model)
    assert not torch.equal(model(x), before)
    check()
    check()


def test_more_than_can_be_looked_at_is_called_as_it_is(monkeypatch):
    settings = SimpleNamespace(scale=1.0, others=[[k] for k in range(20)])
    x = torch.randn(7, 6)
    assert is_unrolled(unrolled(Net(of_settings, settings).eval(), x))
    monkeypatch.setattr(module, "MANY", 20)
    assert not is_unrolled(unrolled(Net(of_settings, settings).eval(), x))


def test_what_is_written_to_an_object_is_put_back():
    net = Net(of_settings, Settings())
    before = Belongings(net.modules())
    net.settings.scale = 3.0
    net.settings.scales.append(2.0)
    net.renamed = vars(net).pop("read")
    assert not before.are_left()
    before.put_back()
    assert net.read is of_settings
    assert before.are_left()
    assert net.settings == Settings()


def test_what_is_written_in_a_notebook_is_nobody_elses(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/site-packages/launcher.py", raising=False)
    assert not module._is_others(type("Own", (), {"__module__": "__main__"}))
    assert module._is_others(pytest.MonkeyPatch)
    assert module._is_others(nn.Linear)
    assert not module._is_others(Net)


def test_containers_that_cannot_be_written_to_are_left_alone():
    class Fixed(dict):
        def clear(self):
            raise TypeError

    net = Net(lambda net: net.settings["scale"], Fixed(scale=1.0))
    before = Belongings(net.modules())
    before.put_back()
    assert before.are_left()
    assert is_unrolled(unrolled(net.eval(), torch.randn(7, 6)))


def test_torchs_own_and_what_a_library_logs_are_not_looked_into():
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    assert not Belongings(net.modules(), seen=True).read
    net = Net(of_settings, logging.getLogger("bayeslim.tests"))
    belongings = Belongings(net.modules(), seen=True)
    logging.getLogger("bayeslim.tests").isEnabledFor(10)
    assert belongings.are_left()
