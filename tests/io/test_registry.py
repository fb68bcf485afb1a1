"""The registry: one table of names, open to classes of others."""

from __future__ import annotations

import pytest

import bayeslim as bl
from bayeslim.errors import BayeslimError, NotRegistered
from bayeslim.io.registry import KINDS, all_registered, entry_of, registered, unregister
from bayeslim.priors import Normal, Prior


@pytest.fixture
def wide():
    @bl.register("prior")
    class Wide(Prior):
        name = "wide"

    yield Wide
    unregister("prior", "wide")


def test_a_registered_class_is_found_by_its_name(wide):
    assert registered("prior", "wide") is wide
    assert entry_of(wide()) == ("prior", "wide")
    assert all_registered("prior")["wide"] is wide


def test_a_subclass_is_not_its_parent(wide):
    class Wider(wide):
        pass

    assert entry_of(Wider()) is None


def test_the_name_may_be_given(wide):
    try:
        bl.register("prior", "broad")(wide)
        assert registered("prior", "broad") is wide
    finally:
        unregister("prior", "broad")


def test_two_classes_under_one_name_are_refused():
    class Other(Normal):
        pass

    with pytest.raises(ValueError, match=r'prior name "normal" belongs to bayeslim\.priors\.normal\.Normal already'):
        bl.register("prior")(Other)
    assert registered("prior", "normal") is Normal


def test_a_definition_that_runs_again_counts(wide):
    again = type("Wide", (Prior,), {"name": "wide", "__module__": wide.__module__, "__qualname__": wide.__qualname__})
    bl.register("prior")(again)
    assert registered("prior", "wide") is again


def test_unknown_names_say_what_is_near():
    with pytest.raises(NotRegistered, match=r'no prior called "norml". The closest names are "normal"') as error:
        registered("prior", "norml")
    assert isinstance(error.value, BayeslimError)
    assert isinstance(error.value, ValueError)
    with pytest.raises(NotRegistered, match=r"Registered names: .*normal"):
        registered("prior", "xyzzy")


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=f"A kind must be one of {', '.join(KINDS)}. Got 'piror'"):
        bl.register("piror")


def test_names_are_strings():
    class Numbered(Prior):
        name = 3

    with pytest.raises(TypeError, match=r"must be a string. Got 3"):
        bl.register("prior")(Numbered)


def test_the_view_cannot_be_written_to():
    with pytest.raises(TypeError):
        all_registered("prior")["mine"] = Normal
