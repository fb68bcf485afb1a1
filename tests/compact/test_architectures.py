"""Compaction is exact on every kind of network, whatever is cut."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from networks import CASES, build, outputs, prepared
from torch import nn

import bayeslim as bl
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


GRAPHS = {"lenet_5", "transformer_encoder", "custom_layers", "gru_cell", "inception"}
"""Networks whose forward does not allow the user's modules in a smaller size."""


@pytest.mark.parametrize("name", CASES)
def test_half_of_all_units_cut_at_random(name):
    (model, example), graph = prepared(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    cut = random_half(graph, 0)
    masks = graph.masks(cut)
    result = compaction(model, masks, example, units=graph)
    fresh = build(name)[1]  # inputs that compaction did not see
    fresh = tuple(x.flip(0) for x in fresh) if isinstance(fresh, tuple) else fresh.flip(0)
    assert_equal(outputs_of(zeroed(model, masks), fresh), outputs_of(result.network, fresh))
    assert len(result.removed) >= 0.8 * len(cut)  # one of each layer stays when all of them are cut
    assert sum(p.numel() for p in result.network.parameters()) < sum(p.numel() for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert result.kind == ("graph" if name in GRAPHS else "modules")
    assert result.network.state_dict().keys() <= model.state_dict().keys()
    if result.kind == "modules":
        assert type(result.network) is type(model)
        assert str(result.network) != str(model)


def outputs_of(model, example):
    with torch.no_grad():
        return model(*example) if isinstance(example, tuple) else model(example)


KINDS = ("incoming", "incoming weights", "outgoing", "weights at random")
"""Kinds of cuts; every other architecture is cut in one of them, in turn, since tracing takes seconds."""


@pytest.mark.parametrize(("name", "what"), list(zip(list(CASES)[::2], itertools.cycle(KINDS), strict=False)))
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


class Padded(nn.Module):
    """Attention that does not look at padding, alone or in a transformer; the mask is given, or made of the tokens.

    If it is causal, it does not look ahead either: two masks are added up.
    """

    def __init__(self, deep: bool, given: bool, causal: bool):
        super().__init__()
        self.given = given
        self.register_buffer("ahead", torch.ones(7, 7).triu(1).bool() if causal else None)
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.mix = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) if deep else attention
        self.head = nn.Linear(16, 3)

    def forward(self, tokens, mask=None):
        mask, x = mask if self.given else tokens == 0, self.embed(tokens)
        if isinstance(self.mix, nn.TransformerEncoder):
            return self.head(
                self.mix(x, self.ahead, mask, self.ahead is not None).masked_fill(mask[..., None], 0).mean(1)
            )
        mixed, _ = self.mix(x, x, x, key_padding_mask=mask, need_weights=False, attn_mask=self.ahead)
        return self.head((x + mixed).mean(1))


@pytest.mark.parametrize(
    ("deep", "given", "causal"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
    ids=["attention", "attention, mask given, causal", "transformer, causal", "transformer, mask given"],
)
def test_heads_go_from_attention_with_a_padding_mask(deep, given, causal):
    torch.manual_seed(0)
    model = Padded(deep, given, causal).eval()
    tokens = torch.randint(1, 20, (6, 7))
    tokens[:, 5:] = 0
    x = (tokens, tokens == 0) if given else tokens
    bnn = bl.bayesianize(model, bl.Laplace(structure="diag"), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, torch.randint(0, 3, (6,)))])
    plan = bl.plan(bnn, bl.Budget(sparsity=0.3), granularity="unit", criterion="magnitude", example=x)
    assert "an input of the network" not in str(plan)
    mixing = model.mix.layers[0].self_attn if deep else model.mix
    with torch.no_grad():  # the second of four heads
        for block in (mixing.in_proj_weight.view(3, 4, 4, 16), mixing.in_proj_bias.view(3, 4, 4)):
            block[:, 1] = 0
        mixing.out_proj.weight[:, 4:8] = 0
    slim = bl.compact(model, x)
    left = dict(slim.named_parameters())
    name = next(n for n in left if n.endswith("in_proj_weight"))
    assert left[name].shape[0] == 36, {n: p.shape for n, p in left.items()}
    args = x if given else (x,)
    torch.testing.assert_close(slim(*args), model(*args), rtol=1e-4, atol=1e-5)
    longer = tuple(torch.cat([a, a]) for a in args)
    torch.testing.assert_close(slim(*longer), model(*longer), rtol=1e-4, atol=1e-5)


class InPlace(nn.Module):
    """Works in place; the offset is of the given precision."""

    def __init__(self, dtype):
        super().__init__()
        self.into, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("offset", torch.rand(6, dtype=dtype))

    def forward(self, x):
        h = self.into(x)
        h += self.offset
        before = h.relu()
        h.masked_fill_(h < 0, 0.5).mul_(2)
        return self.out(h + before)


@pytest.mark.parametrize(("dtype", "retraced"), [(torch.float32, False), (torch.float64, True)])
def test_what_works_in_place_is_the_same_elsewhere_unless_it_would_change_its_type(dtype, retraced, monkeypatch):
    calls = []
    whole = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda *args: calls.append(1) or whole(*args)
    )
    model, x = InPlace(dtype).eval(), torch.randn(5, 4)
    with torch.no_grad():
        for tensor in (model.into.weight[2], model.into.bias[2:3], model.offset[2:3], model.out.weight[:, 2]):
            tensor.zero_()
    slim = bl.compact(model, x)
    assert bool(calls) == retraced
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(slim(x), model(x))
