"""Cuts block by block that follow the dense network, against least squares and exact gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from block_networks import decoder, inputs_of_layers, tokens
from torch import nn

import bayeslim as bl
from bayeslim.prune.streaming.block_run import BlockRun
from bayeslim.prune.streaming.factors import KroneckerSettings, measure, output_weights
from bayeslim.prune.streaming.prune_blocks import even_places
from bayeslim.prune.streaming.restored import Call, Watched, allocation
from bayeslim.types import split_batch

HALF = bl.Budget(sparsity=0.5)
IN_ORDER = (("q", "k", "v"), ("o",), ("up",), ("down",))


def streams(model, block, batches):
    """Record what the outputs of a block's layers are added to, as rows; nothing for most."""
    module, seen = model.get_submodule(block), {"o": [], "down": []}
    hooks = [
        module.register_forward_pre_hook(lambda _m, args: seen["o"].append(args[0])),
        module.norm2.register_forward_pre_hook(lambda _m, args: seen["down"].append(args[0])),
    ]
    with torch.no_grad():
        for batch in batches:
            model(split_batch(batch)[0])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat([x.flatten(0, -2) for x in found]) for name, found in seen.items()}


def test_restored_layers_are_the_least_squares_fit_to_the_dense_network():
    model, batches, damping = decoder().double(), tokens(batches=4, examples=5), 0.02
    pruned = bl.prune_blocks(model, HALF, batches, damping=damping, tolerance=1e-12, progress=False)
    cut_so_far = copy.deepcopy(model)
    for block in ("layers.0", "layers.1"):
        dense_rows, dense_streams = inputs_of_layers(model, block, batches), streams(model, block, batches)
        for group in IN_ORDER:
            rows, own_streams = inputs_of_layers(cut_so_far, block, batches), streams(cut_so_far, block, batches)
            for name in group:
                layer, new = (m.get_submodule(f"{block}.{name}") for m in (model, pruned.model))
                before = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
                wanted = dense_rows[name] @ before.T
                if name in own_streams:
                    wanted = wanted + dense_streams[name] - own_streams[name]
                x, mask = rows[name], pruned.plan.masks[f"{block}.{name}.weight"]
                ridge = (damping * x.square().mean()).sqrt() * torch.eye(x.shape[1], dtype=torch.float64)
                design = torch.cat([x / len(x) ** 0.5, ridge])
                goal = torch.cat([wanted / len(x) ** 0.5, ridge @ before.T])
                kept = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.bool)], 1)
                for row in range(len(before)):
                    fit = torch.linalg.lstsq(design[:, kept[row]], goal[:, row]).solution
                    found = torch.cat([new.weight[row], new.bias[row, None]])
                    torch.testing.assert_close(found[kept[row]], fit, rtol=1e-6, atol=1e-8)
                    assert bool((found[~kept[row]] == 0).all())
            for name in group:
                done = pruned.model.get_submodule(f"{block}.{name}").state_dict()
                cut_so_far.get_submodule(f"{block}.{name}").load_state_dict(done)


def test_a_layer_that_runs_often_is_followed_in_linear_time(monkeypatch):
    layer, x, compared, same = nn.Linear(4, 4), torch.randn(2, 4), [], Call.is_unchanged
    monkeypatch.setattr(Call, "is_unchanged", lambda call, other: compared.append(call) or same(call, other))
    with torch.no_grad(), Watched({"layer": layer}) as watched:
        streams, sums = [x.clone()], x.clone()
        for _ in range(50):
            sums += layer(sums)
            streams.append(sums.clone())
    for call, stream in zip(watched.calls["layer"], streams, strict=False):
        assert torch.equal(call.stream, stream)
    assert len(compared) < 10 * 50


def distance(model, other, batches):
    with torch.no_grad():
        pairs = [(model(x).log_softmax(-1), other(x).log_softmax(-1)) for x, _ in batches]
    return float(torch.stack([F.kl_div(b, a, log_target=True, reduction="batchmean") for a, b in pairs]).mean())


@pytest.fixture(scope="module")
def trained():
    model = decoder(width=16, blocks=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(150):  # a word is the sum of the two before it
        words = torch.randint(0, 11, (32, 9), generator=generator)
        for place in range(2, 9):
            words[:, place] = (words[:, place - 1] + words[:, place - 2]) % 11
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, [(words[i : i + 8, :-1], words[i : i + 8, 1:]) for i in range(0, 32, 8)]


def test_restored_cuts_stay_closer_to_the_dense_network_than_local_ones(trained):
    model, batches = trained
    options = {"progress": False, "likelihood": bl.likelihoods.Categorical()}
    ways = {
        way: distance(model, bl.prune_blocks(model, HALF, batches, curvature=way, **options).model, batches)
        for way in ("restored", "local")
    }
    assert ways["restored"] < 0.8 * ways["local"]


def test_output_weights_are_the_diagonals_of_the_output_factors():
    model, batches = decoder().double(), tokens(batches=2)
    inputs, targets = ([split_batch(batch)[part] for batch in batches] for part in (0, 1))
    run = BlockRun(model, ("layers.0", "layers.1"), inputs)
    settings = KroneckerSettings(bl.likelihoods.Categorical(), targets, (0, 1), 1.0, "exact")
    found = output_weights(run, settings)
    assert len(found) == 12
    for block in ("layers.0", "layers.1"):
        assert run.names[run.done] == block
        for name, curvature in measure(run, {}, settings)[0].items():
            diagonal = curvature.outputs.diagonal(dim1=1, dim2=2)
            torch.testing.assert_close(found.pop(name), diagonal)
        run.advance()
    assert not found


def test_allocation_keeps_the_sparsity_and_cuts_low_scores_further():
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": 1000, "b": 3000, "c": 500}
    scores = {n: torch.rand(k, generator=generator) * f for (n, k), f in zip(sizes.items(), (1, 3, 30), strict=True)}
    quantiles = {n: v.sort().values[torch.linspace(0, len(v) - 1, 201).long()] for n, v in scores.items()}
    shares = allocation(quantiles, sizes, 0.6, 0.25)
    assert sum(shares[n] * sizes[n] for n in sizes) / 4500 == pytest.approx(0.6, abs=1e-9)
    assert shares["a"] > shares["b"] > shares["c"] > 0
    assert shares["a"] == pytest.approx(0.6 + (0.9 - 0.6) / 2, abs=0.01)  # the first term is bounded by 1 − 0.25 · 0.4


def test_allocation_keeps_the_sparsity_where_most_scores_are_equal():
    """Dead units have scores of zero; one threshold would take all of them or none."""
    torch.manual_seed(0)
    dead = torch.cat([torch.zeros(80), torch.rand(21)]).sort().values
    quantiles, sizes = {"dead": dead, "alive": torch.rand(101).sort().values}, {"dead": 100, "alive": 300}
    for sparsity in (0.01, 0.05, 0.2, 0.6):
        shares = allocation(quantiles, sizes, sparsity, 0.25)
        assert sum(shares[n] * sizes[n] for n in sizes) == pytest.approx(400 * sparsity)
        assert all(sparsity / 2 <= share < 1 for share in shares.values())
        assert shares["dead"] > shares["alive"]


def test_quantiles_of_large_layers_end_at_their_last_score():
    for count in (1, 7, 58_720_256):
        places = even_places(count)
        assert places[0] == 0
        assert places[-1] == count - 1
        assert bool((places.diff() >= 0).all())


class Adding(nn.Module):
    """A block whose layer's outputs reach the stream in different ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if self.how == "in place":  # the output goes through two sums, as in parallel attention
            y += x.sin()
            return x + y
        if self.how == "twice":  # the second sum adds something that depends on the output
            x = x + y
            return x + x.tanh()
        if self.how == "transposed":
            return (x.mT + y.mT).mT
        return x + (y.relu_() if self.how == "relu" else y.view(-1, 4).view(x.shape))


STREAMS = {
    "relu": lambda x: 0,
    "view": lambda x: x,
    "in place": lambda x: x + x.sin(),
    "twice": lambda x: x,
    "transposed": lambda x: 0,
}


@pytest.mark.parametrize("how", STREAMS)
def test_the_stream_is_all_that_the_output_itself_is_added_to(how):
    torch.manual_seed(0)
    model = nn.Sequential(*[Adding(how) for _ in range(3)]).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    pruned = bl.prune_blocks(model, HALF, [x], blocks=["0", "1", "2"], damping=1e-9, tolerance=1e-12, progress=False)
    with torch.no_grad():
        dense_in, own_in = model[:2](x), pruned.model[:2](x)
        wanted = model[2].linear(dense_in) + STREAMS[how](dense_in) - STREAMS[how](own_in)
    kept = pruned.plan.masks["2.linear.weight"]
    ones = torch.ones(40, 1, dtype=torch.float64)
    for row in range(4):
        design = torch.cat([own_in[:, kept[row]], ones], 1)
        fit = torch.linalg.lstsq(design, wanted[:, row]).solution
        torch.testing.assert_close(
            pruned.model[2].linear.weight[row][kept[row]].detach(), fit[:-1], rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("sparsity", [1e-5, 0.99999])
def test_layers_too_small_for_a_budget_give_a_warning(sparsity):
    options = {"curvature": "local", "progress": False}
    with pytest.warns(bl.errors.BayeslimWarning, match=rf"sparsity={sparsity}\) was asked for, and the layers reached"):
        bl.prune_blocks(decoder(), bl.Budget(sparsity=sparsity), tokens(batches=1), **options)
