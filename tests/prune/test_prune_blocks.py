"""Cuts block by block: against least squares, against the cut of the whole network, and what they leave behind."""

import copy
import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from block_networks import Skipping, decoder, inputs_of_layers, tokens
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, BayeslimWarning, NoSiteMatched, UnsupportedModel
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.prune.streaming import block_cut
from bayeslim.prune.streaming import prune_blocks as verb
from bayeslim.prune.streaming.found_blocks import find_blocks
from bayeslim.prune.streaming.layer_curvature import LayerCurvature

HALF = bl.Budget(sparsity=0.5)
EXACT = {"tolerance": 1e-12, "progress": False}
LOCAL = {"curvature": "local", "progress": False}
RESTORED = {"likelihood": bl.likelihoods.Categorical(), "progress": False}


def kronecker(**options):
    return {"curvature": "kronecker", "likelihood": bl.likelihoods.Categorical(), **EXACT} | options


def test_local_survivors_are_the_least_squares_fit_of_every_row_on_its_inputs():
    model, batches = decoder().double(), tokens()
    pruned = bl.prune_blocks(model, HALF, batches, curvature="local", damping=0.02, **EXACT)
    cut_so_far = copy.deepcopy(model)
    for block in ("layers.0", "layers.1"):  # the second block sees the outputs of the first after its cut
        for name, rows in inputs_of_layers(cut_so_far, block, batches).items():
            layer, new = (m.get_submodule(f"{block}.{name}") for m in (model, pruned.model))
            before = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
            mask = pruned.plan.masks[f"{block}.{name}.weight"]
            kept = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.bool)], 1)
            moment = rows.T @ rows / len(rows)
            ridge = (0.02 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)).sqrt()
            design = torch.cat([rows / len(rows) ** 0.5, ridge])
            for row in range(len(before)):
                wanted = torch.linalg.lstsq(design[:, kept[row]], design @ before[row]).solution
                found = torch.cat([new.weight[row], new.bias[row, None]])
                torch.testing.assert_close(found[kept[row]], wanted, rtol=1e-7, atol=1e-9)
                assert bool((found[~kept[row]] == 0).all())
            variance = torch.linalg.inv(moment + ridge.square()).diagonal()[:-1]
            scores = before[:, :-1].square() / variance
            assert scores[mask].min() >= scores[~mask].max()
        cut_so_far.get_submodule(block).load_state_dict(pruned.model.get_submodule(block).state_dict())


def test_kronecker_cut_of_a_block_is_that_of_the_whole_network_given_all_else(monkeypatch):
    monkeypatch.setattr(verb, "COLUMNS", "exact")
    model, batches = decoder().double(), tokens()
    budget = bl.Budget(sparsity=0.5, scope="layer")
    pruned = bl.prune_blocks(model, budget, batches, prior_std=0.7, **kronecker())
    network = copy.deepcopy(model)
    for block in ("layers.0", "layers.1"):
        sites = [rf"{block}\.(q|k|v|o|up|down)\.(weight|bias)"]
        whole = {}
        for damping in ("sqrt", "exact"):
            method = bl.Laplace(curvature="exact", damping=damping)
            whole[damping] = bl.bayesianize(
                network, method, likelihood=bl.likelihoods.Categorical(), prior=bl.priors.Normal(0.7), sites=sites
            )
            whole[damping].fit(batches, progress=False)
        plan = bl.plan(whole["sqrt"], budget)
        for name, mask in plan.masks.items():
            assert torch.equal(pruned.plan.masks[name], mask), name
        network = bl.prune(whole["exact"], plan).mean_network()
        for name in plan.masks:
            found = pruned.model.get_parameter(name)
            torch.testing.assert_close(found, network.get_parameter(name), rtol=1e-3, atol=1e-5)
            assert not torch.allclose(found, model.get_parameter(name) * plan.masks[name], atol=1e-4)


def test_patterns_and_solves_are_in_the_plan():
    model = decoder(bias=False)
    for options in ({"progress": False}, kronecker()):
        pruned = bl.prune_blocks(model, None, tokens(), granularity="2:4", **options)
        for name, mask in pruned.plan.masks.items():
            assert bool((mask.unflatten(1, (-1, 4)).sum(-1) == 2).all())
            assert torch.equal(pruned.model.get_parameter(name) != 0, mask)
        assert pruned.plan.solves.keys() == pruned.plan.masks.keys()
        assert all(solve.converged for solve in pruned.plan.solves.values())
        assert len(pruned.plan.masks) == 12


@pytest.mark.parametrize(
    "options", [RESTORED, LOCAL, kronecker(tolerance=1e-3)], ids=["restored", "local", "kronecker"]
)
def test_units_go_whole_and_the_network_becomes_smaller(options):
    model = decoder(blocks=1)
    pruned = bl.prune_blocks(model, bl.Budget(sparsity=0.3), tokens(), granularity="unit", **options)
    gone = ~pruned.plan.masks["layers.0.down.weight"].any(0)
    assert bool(gone.any())
    assert torch.equal(~pruned.plan.masks["layers.0.up.weight"].any(1), gone)
    assert bool((pruned.model.layers[0].up.bias[gone] == 0).all())
    assert not torch.equal(pruned.model.layers[0].down.weight[:, ~gone], model.layers[0].down.weight[:, ~gone])
    slim = bl.compact(pruned.model, example=tokens()[0][0])
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in model.parameters())


def test_column_costs_of_units_are_those_of_conditioning():
    generator = torch.Generator().manual_seed(0)
    a, g, mean = (torch.randn(1, *shape, generator=generator).double() for shape in ((5, 9), (3, 9), (3, 5)))
    for outputs in (None, g @ g.mT):
        curvature = LayerCurvature(LayerMatrix("w", None, (3, 5)), a @ a.mT, outputs, 0.5)
        inputs = curvature.inputs[0] + curvature.dampings[0] * torch.eye(5).double()
        left = torch.eye(3).double()
        if outputs is not None:
            left = outputs[0] + curvature.dampings[1] * torch.eye(3).double()
        covariance = torch.linalg.inv(torch.kron(left, inputs))
        for lines, costs, place in (
            ([[1], [0, 3]], curvature.column_costs, lambda c: [o * 5 + i for o in range(3) for i in c]),
            ([[2], [0, 1]], curvature.row_costs, lambda c: [o * 5 + i for o in c for i in range(5)]),
        ):
            for lost, cost in zip(lines, costs(mean, lines), strict=True):
                chosen = place(lost)
                mu = mean[0].flatten()[chosen]
                wanted = 0.5 * mu @ torch.linalg.solve(covariance[chosen][:, chosen], mu)
                torch.testing.assert_close(cost, wanted)


class Killed(Exception):
    pass


def killed_at(place, monkeypatch):
    done = []

    def cut(run, *arguments):
        if len(done) == place:
            raise Killed
        done.append(run.names[run.done])
        return block_cut.cut_block(run, *arguments)

    monkeypatch.setattr(verb, "cut_block", cut)
    return done


@pytest.mark.parametrize(
    "options", [RESTORED, LOCAL, kronecker(tolerance=1e-3)], ids=["restored", "local", "kronecker"]
)
def test_a_killed_cut_goes_on_at_its_block_with_equal_bits(tmp_path, monkeypatch, options):
    model, batches = decoder(blocks=3).bfloat16(), tokens()
    whole = bl.prune_blocks(model, HALF, batches, **options)
    killed_at(2, monkeypatch)
    with pytest.raises(Killed):
        bl.prune_blocks(model, HALF, batches, checkpoint=tmp_path, **options)
    done = killed_at(9, monkeypatch)
    resumed = bl.prune_blocks(model, HALF, batches, checkpoint=tmp_path, **options)
    assert done == ["layers.2"]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert whole.plan == resumed.plan
    assert whole.plan.solves == resumed.plan.solves
    for changed, data in ((decoder(seed=5, blocks=3).bfloat16(), batches), (model, tokens(seed=9))):
        with pytest.raises(BayeslimError, match="another run"):
            bl.prune_blocks(changed, HALF, data, checkpoint=tmp_path, **options)


def traces(model):
    return {
        name: (
            module.training,
            dict(module.__dict__).keys(),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("options", [RESTORED, LOCAL, kronecker()], ids=["restored", "local", "kronecker"])
def test_nothing_is_left_behind_after_a_cut_or_an_error(options, monkeypatch):
    model, batches = decoder(), tokens()
    model.layers[1].train(False)
    before, weights = traces(model), copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    bl.prune_blocks(model, HALF, batches, **options)
    broken = [*batches, (torch.full((2, 5), 99), torch.zeros(2, 5, dtype=torch.int64))]
    with pytest.raises(IndexError):
        bl.prune_blocks_(model, HALF, broken, **options)
    killed_at(0, monkeypatch)
    with pytest.raises(Killed):
        bl.prune_blocks_(model, HALF, batches, **options)
    assert traces(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_in_place_cuts_the_network_itself():
    model, batches = decoder(), tokens()
    wanted = bl.prune_blocks(model, HALF, batches, progress=False)
    found = bl.prune_blocks_(model, HALF, batches, progress=False)
    assert found.model is model
    for name, value in wanted.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert torch.equal(model.table.weight, decoder().table.weight)


@pytest.mark.parametrize(
    "options", [RESTORED, LOCAL, kronecker(tolerance=1e-3)], ids=["restored", "local", "kronecker"]
)
def test_factors_and_outputs_of_one_block_live_at_a_time(options, monkeypatch):
    model, batches = decoder(blocks=4), tokens()
    references, made, live, kept = [], [], [], []

    def blocks_in_memory():
        alive = [reference() for reference in references]
        return {curvature.layer.weight[: len("layers.0")] for curvature in alive if curvature is not None}

    def noted(curvature):
        references.append(weakref.ref(curvature))
        made.append(blocks_in_memory())

    def cut(run, *arguments):
        live.append(blocks_in_memory())
        found = block_cut.cut_block(run, *arguments)
        kept.append([output for output in run._kept if output is not None])
        return found

    monkeypatch.setattr(LayerCurvature, "check", noted)
    monkeypatch.setattr(verb, "cut_block", cut)
    bl.prune_blocks(model, HALF, batches, **options)
    passes = 2 if options is RESTORED else 1  # the first shares the sparsity out between the layers
    assert made == [{f"layers.{block}"} for block in range(4) for _ in range(6)] * passes
    assert live == [set()] * 4  # the factors of a block are gone when the next one begins
    assert [len(outputs) for outputs in kept] == [0, 3, 3, 3]  # one output a batch, whatever the depth


def test_blocks_with_tuples_caches_and_keyword_arguments():
    plain, batches = decoder(), tokens()
    for options in (RESTORED, LOCAL, kronecker(tolerance=1e-6)):
        wanted = bl.prune_blocks(plain, HALF, batches, offload="cpu", **options).model
        for variant in ({"as_tuple": True}, {"cached": True}):
            found = bl.prune_blocks(decoder(**variant), HALF, batches, **options).model
            for name, value in wanted.state_dict().items():
                torch.testing.assert_close(found.state_dict()[name], value)


class Experts(nn.Module):
    """A block whose router sends each position to one of its experts; one parameter may hold all experts."""

    def __init__(self, fused):
        super().__init__()
        self.first, self.router = nn.Linear(8, 8), nn.Linear(8, 3)
        self.router.weight.data.mul_(10)
        if fused:
            self.weights = nn.Parameter(torch.randn(3, 8, 8) / 3)
        else:
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        x = x + self.first(x)
        chosen = self.router(x).argmax(-1)
        if hasattr(self, "weights"):
            return x + torch.einsum("...i,...io->...o", x, self.weights[chosen]).tanh()
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            out[chosen == place] = expert(x[chosen == place])
        return x + out


def experts(fused):
    torch.manual_seed(0)
    return nn.Sequential(*[Experts(fused) for _ in range(2)]), [torch.randn(4, 6, 8) for _ in range(3)]


def test_experts_in_one_parameter_stay_with_a_warning():
    model, batches = experts(fused=True)
    with pytest.warns(BayeslimWarning, match=r"384 of 560 parameters of the blocks stay.*0\.weights, because Experts"):
        bl.prune_blocks(model, HALF, batches, blocks=["0", "1"], progress=False)
    budget = bl.Budget(sparsity=0.5, protect=["*weights"])
    assert bl.prune_blocks(model, budget, batches, blocks=["0", "1"], progress=False).plan.sparsity == 0.5


def test_experts_that_a_router_chooses_are_cut_by_their_own_curvature():
    model, batches = experts(fused=False)
    batches.append(torch.zeros(1, 1, 8))  # two of the experts read nothing
    with pytest.raises(UnsupportedModel, match=r'reads other positions.*curvature="local"'):
        bl.prune_blocks(model, HALF, batches, blocks=["0", "1"], progress=False)
    cut = bl.prune_blocks(model, HALF, batches, blocks=["0", "1"], **LOCAL)
    assert len(cut.plan.masks) == 10
    assert cut.plan.sparsity == 0.5


def test_decoders_run_without_their_cache():
    """Blocks may take it by position, under any name."""
    model, seen = decoder(), []
    model.config = SimpleNamespace(use_cache=True)
    model.register_forward_pre_hook(lambda module, args: seen.append(module.config.use_cache))
    cut = bl.prune_blocks_(model, HALF, tokens(), **kronecker())
    assert seen
    assert not any(seen)
    assert model.config.use_cache
    assert cut.model.config.use_cache


def test_a_bayesian_network_gives_its_likelihood_and_prior():
    model, batches = decoder(), tokens()
    bnn = bl.bayesianize(
        model, bl.Laplace(), likelihood=bl.likelihoods.Categorical(), prior=bl.priors.Normal(0.3), sites="weights"
    )
    found = bl.prune_blocks(bnn, HALF, batches, curvature="kronecker", progress=False).model
    wanted = bl.prune_blocks(model, HALF, batches, **kronecker(prior_std=0.3, tolerance=1e-3)).model
    for name, value in wanted.state_dict().items():
        assert torch.equal(value, found.state_dict()[name])


def changed_batches():
    """Other data with the first batch of `tokens()`: other words, and the same words in another order."""
    first, *_, (x, y) = tokens()
    return [[first, *tokens(seed=9)[1:]], [*tokens()[:-1], (x.flip(1), y)]]


@pytest.mark.parametrize("change", [0, 1])
@pytest.mark.parametrize("kind", [tuple, UserDict])
def test_a_checkpoint_refuses_other_data_in_any_batch(tmp_path, change, kind):
    def batches(data):
        return data if kind is tuple else [UserDict(tokens=x, labels=y) for x, y in data]

    model = decoder()
    wanted = bl.prune_blocks(model, HALF, batches(tokens()), checkpoint=tmp_path, **LOCAL)
    with pytest.raises(BayeslimError, match="its calibration data differs"):
        bl.prune_blocks(model, HALF, batches(changed_batches()[change]), checkpoint=tmp_path, **LOCAL)
    assert wanted.plan == bl.prune_blocks(model, HALF, batches(tokens()), checkpoint=tmp_path, **LOCAL).plan


def test_a_network_that_was_cut_before_is_refused():
    bnn = bl.bayesianize(decoder(), bl.Laplace("diag"), likelihood=bl.likelihoods.Categorical())
    bnn.fit(tokens(), progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.4))
    with pytest.raises(UnsupportedModel, match="bring back weights that were cut before"):
        bl.prune_blocks(pruned, HALF, tokens(), **LOCAL)


def test_a_wrapper_for_several_devices_is_refused():
    with pytest.raises(UnsupportedModel, match=r"model\.module"):
        bl.prune_blocks(nn.DataParallel(decoder()), HALF, tokens(), **LOCAL)


def test_protected_tied_and_unread_weights_stay_with_a_reason():
    model = decoder()
    model.layers[1].k.weight = model.layers[0].k.weight
    budget = bl.Budget(sparsity=0.5, protect=["layers.0.up"])
    pruned = bl.prune_blocks(model, budget, tokens(), progress=False)
    assert "layers.0.up.weight" not in pruned.plan.masks
    assert pruned.plan.left["layers.0.up.weight"] == "protected"
    assert "shared" in pruned.plan.left["layers.1.k.weight"]
    assert torch.equal(pruned.model.layers[0].k.weight, model.layers[0].k.weight)


def test_blocks_are_found_by_list_name_and_glob():
    model = nn.ModuleDict({"inner": decoder(blocks=3), "other": nn.ModuleList([nn.Linear(2, 2)])})
    assert find_blocks(model) == ("inner.layers.0", "inner.layers.1", "inner.layers.2")
    assert find_blocks(model, "other") == ("other.0",)
    assert find_blocks(model, "inner.*.2") == ("inner.layers.2",)
    with pytest.raises(NoSiteMatched, match=r"Closest names: .*inner\.layers"):
        find_blocks(model, "inner.layer")
    with pytest.raises(NoSiteMatched, match="Pass blocks="):
        find_blocks(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModel, match=r"2 lists of 2 modules: encoder\.layers, decoder\.layers\."):
        find_blocks(nn.ModuleDict({"encoder": decoder(), "decoder": decoder()}))
    with pytest.raises(UnsupportedModel, match="apart"):
        find_blocks(model, ["inner.layers", "inner.layers.0.q"])


def test_refusals_say_what_to_do():
    model, batches = decoder(), tokens()
    with pytest.raises(UnsupportedModel, match=r"Use bl\.prune"):
        bl.prune_blocks(Skipping(), HALF, [torch.randn(3, 4)], progress=False)
    between = bl.zoo.create("resnet18", in_channels=1, classes=10, width=4)  # a batch norm follows the first block
    with pytest.raises(UnsupportedModel, match="Leave the blocks before them out"):
        bl.prune_blocks(
            between, HALF, [torch.rand(2, 1, 8, 8)], blocks=["conv", "stage2.0", "stage3.0"], progress=False
        )
    unused = decoder()
    unused.spare = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UnsupportedModel, match="ran 0 times"):
        bl.prune_blocks(unused, HALF, batches, blocks="spare", progress=False)
    with pytest.raises(TypeError, match="likelihood"):
        bl.prune_blocks(model, HALF, batches, curvature="kronecker")
    with pytest.raises(TypeError, match="sparsity"):
        bl.prune_blocks(model, bl.Budget(parameters=10), batches)
    with pytest.raises(ValueError, match='scope="layer"'):
        bl.prune_blocks(model, bl.Budget(sparsity=0.3, uniform=True), batches, granularity="unit")
    with pytest.raises(ValueError, match="granularity"):
        bl.prune_blocks(model, HALF, batches, granularity="head")
    with pytest.raises(ValueError, match="at least one batch"):
        bl.prune_blocks(model, HALF, [])
    ignored = [(x, torch.full_like(y, -100)) for x, y in batches]
    with pytest.raises(BayeslimError, match="nothing to learn"):
        bl.prune_blocks(model, HALF, ignored, likelihood=bl.likelihoods.Categorical())
    with pytest.raises(BayeslimError, match="NaN"):
        bl.prune_blocks(nn.Sequential(nn.Linear(4, 4)), HALF, [torch.full((2, 4), torch.nan)], blocks="0")
