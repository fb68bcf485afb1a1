"""Compaction is exact on every kind of network, whatever is cut."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from networks import CASES, build, outputs, prepared
from torch import nn

from bayeslim.compact import compaction


def zeroed(model: nn.Module, masks: dict[str, torch.Tensor]) -> nn.Module:
    masked = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in masked.named_parameters():
            parameter *= masks[name]
    return masked


def random_half(graph, seed: int) -> list[int]:
    order = torch.randperm(len(graph.units), generator=torch.Generator().manual_seed(seed))
    return order[: math.ceil(len(graph.units) / 2)].tolist()


def assert_equal(expected, actual) -> None:
    for a, b in zip(outputs(expected), outputs(actual), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_half_of_all_units_cut_at_random(name):
    (model, example), graph = prepared(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for seed in range(2):
        cut = random_half(graph, seed)
        masks = graph.masks(cut)
        result = compaction(model, masks, example, units=graph)
        fresh = build(name)[1]  # inputs that compaction did not see
        fresh = tuple(x.flip(0) for x in fresh) if isinstance(fresh, tuple) else fresh.flip(0)
        assert_equal(outputs_of(zeroed(model, masks), fresh), outputs_of(result.network, fresh))
        assert len(result.removed) >= 0.8 * len(cut)  # one of each layer stays when all of them are cut
        assert sum(p.numel() for p in result.network.parameters()) < sum(p.numel() for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def outputs_of(model, example):
    with torch.no_grad():
        return model(*example) if isinstance(example, tuple) else model(example)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["incoming", "incoming weights", "outgoing", "weights at random"])
def test_whatever_is_cut_the_answers_stay(name, what):
    (model, example), graph = prepared(name)
    generator = torch.Generator().manual_seed(len(what))
    masks = graph.masks([])
    if what == "weights at random":
        masks = {key: torch.rand(mask.shape, generator=generator) < 0.04 for key, mask in masks.items()}
    for place in random_half(graph, 2) if what != "weights at random" else []:
        unit = graph.units[place]
        for part in unit.outgoing if what == "outgoing" else unit.incoming:
            if what != "incoming weights" or model.get_parameter(part.parameter).ndim > 1:
                masks[part.parameter].index_fill_(part.dim, torch.tensor(part.indices), False)
    result = compaction(model, masks, example, units=graph)
    assert_equal(outputs_of(zeroed(model, masks), example), outputs_of(result.network, example))
    if what == "outgoing":
        assert result.removed


GRAPHS = {"lenet_5", "transformer_encoder", "custom_layers", "gru_cell", "inception"}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_made_of_the_users_modules_where_their_forward_allows_it(name):
    (model, example), graph = prepared(name)
    result = compaction(model, graph.masks(random_half(graph, 0)), example, units=graph)
    assert result.kind == ("graph" if name in GRAPHS else "modules")
    assert result.network.state_dict().keys() <= model.state_dict().keys()
    if result.kind == "modules":
        assert type(result.network) is type(model)
        assert str(result.network) != str(model)
