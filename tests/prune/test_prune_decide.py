import pytest
import torch
from given_posteriors import FAMILIES, diagonal, given, kronecker, mean_of, two_layers
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
from bayeslim.compact import compact_network, cost
from bayeslim.compact.sparse import stored_bytes
from bayeslim.errors import BayeslimError, NoSiteMatched
from bayeslim.posteriors import Diagonal
from bayeslim.prune import CRITERIA, Criterion, EmptyLayer, NothingToCut, criteria, price
from bayeslim.prune.candidates import Candidates
from bayeslim.prune.plan import decide
from bayeslim.prune.ranking import rank
from bayeslim.prune.search import fewest, most
from bayeslim.prune.settings import Settings

EXAMPLE = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def bnn():
    model = two_layers()
    return given(model, diagonal(model))


def kept(plan, name="0.weight"):
    return int(plan.masks[name].sum())


@forall(st.floats(0.03, 0.9), st.sampled_from(["global", "layer"]), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_a_sparsity_is_hit_to_the_weight(sparsity, scope, seed):
    model = two_layers(seed)
    bnn = given(model, diagonal(model, seed))
    plan = bl.plan(bnn, bl.Budget(sparsity=sparsity, scope=scope, empty_layers="keep best"))
    assert plan.cut == round(48 * sparsity)
    if scope == "layer":
        assert abs(30 - kept(plan) - sparsity * 30) <= 1.5
    scores = criteria.snr.snr(bnn.posterior_, {})
    for name, mask in plan.masks.items():  # within a layer, nothing that goes is better than what stays
        if not bool(mask.all()):
            assert float(scores[name][~mask].max()) <= float(scores[name][mask].min())
    if scope == "global":
        going = torch.cat([scores[n][~m] for n, m in plan.masks.items()])
        staying = torch.cat([scores[n][m] for n, m in plan.masks.items() if int(m.sum()) > 1])
        assert not len(staying) or float(going.max()) <= float(staying.min())


def test_ties_are_broken_by_size_then_by_place():
    model = two_layers()
    mean = mean_of(model)
    same = Diagonal(mean, {n: m.abs() for n, m in mean.items()})  # the same signal to noise everywhere
    plan = bl.plan(given(model, same), bl.Budget(sparsity=0.5))
    assert plan.cut == 24
    assert plan == bl.plan(given(model, same), bl.Budget(sparsity=0.5))
    sizes = {n: mean[n].abs() for n in plan.masks}
    assert max(float(sizes[n][~m].max()) for n, m in plan.masks.items()) <= min(
        float(sizes[n][m].min()) for n, m in plan.masks.items()
    )
    ones = {n: torch.ones_like(m) for n, m in mean.items()}
    plain = bl.plan(given(model, Diagonal(ones, ones)), bl.Budget(sparsity=0.25))
    assert plain.masks["0.weight"].flatten().tolist() == [False] * 12 + [True] * 18


def test_biases_norms_and_points_are_left_alone_with_reasons():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3), nn.Linear(3, 2)).double()
    mean = {n: p for n, p in mean_of(model).items() if not n.startswith("3")}
    plan = bl.plan(given(model, Diagonal(mean, mean)), bl.Budget(sparsity=0.5, protect=["2"]), criterion="magnitude")
    assert set(plan.masks) == {"0.weight"}
    assert plan.left["0.bias"] == "bias"
    assert plan.left["1.weight"] == "normalisation"
    assert plan.left["2.weight"] == "protected"
    assert "no posterior" in plan.left["3.weight"]
    with pytest.raises(NoSiteMatched, match="protect"):
        bl.plan(given(model, Diagonal(mean, mean)), bl.Budget(sparsity=0.5, protect=["conv"]))
    with pytest.raises(BayeslimError, match="No weight"):
        bl.plan(given(model, Diagonal(mean, mean)), bl.Budget(sparsity=0.5, protect=[nn.Linear]))


def test_a_threshold_cuts_what_is_below(bnn):
    plan = bl.plan(bnn, bl.Budget(threshold=1.0), criterion="snr")
    scores = criteria.snr.snr(bnn.posterior_, {})
    assert all(torch.equal(mask, scores[name] >= 1.0) for name, mask in plan.masks.items())
    assert min(plan.thresholds.values()) >= 1.0
    with pytest.raises(ValueError, match='criterion="snr"'):
        bl.plan(bnn, bl.Budget(threshold=1.0))
    with pytest.raises(NothingToCut, match="Raise"):
        bl.plan(bnn, bl.Budget(threshold=-1.0), criterion="snr")
    with pytest.raises(EmptyLayer):
        bl.plan(bnn, bl.Budget(threshold=1e9, empty_layers="refuse"), criterion="snr")
    best = bl.plan(bnn, bl.Budget(threshold=1e9), criterion="snr")
    assert "0.weight would be empty, and keeps its best weight" in best.notes
    assert "note: 2.weight would be empty" in repr(best)
    assert [p.kept for p in best.parameters] == [1, 1]
    for name, mask in best.masks.items():
        assert float(scores[name][mask]) == float(scores[name].max())
        assert "best" in best.left[name]


def test_a_layer_is_never_emptied(bnn):
    posterior = bnn.posterior_
    posterior.std["2.weight"].mul_(1e6)  # everything in the last layer goes first
    with pytest.raises(EmptyLayer, match=r'"2\.weight".*sparsity of 0\.35.*keep best'):
        bl.plan(bnn, bl.Budget(sparsity=0.5, empty_layers="refuse"))
    plan = bl.plan(bnn, bl.Budget(sparsity=0.5))
    assert plan.cut == 24
    assert kept(plan, "2.weight") == 3  # at least a quarter of one half of 18
    assert kept(bl.plan(bnn, bl.Budget(sparsity=0.5, scope="layer")), "2.weight") == 9


def test_parameters_left(bnn):
    plan = bl.plan(bnn, bl.Budget(parameters=40))
    assert 57 - plan.cut == 40
    with pytest.raises(EmptyLayer):
        bl.plan(bnn, bl.Budget(parameters=9, empty_layers="refuse"))
    with pytest.raises(ValueError, match="the least possible is 11 "):
        bl.plan(bnn, bl.Budget(parameters=9, empty_layers="keep best"))
    with pytest.raises(ValueError, match=r"the most possible is a sparsity of 0\.9583"):
        bl.plan(bnn, bl.Budget(sparsity=0.99, empty_layers="keep best"))
    with pytest.raises(NothingToCut, match="met without"):
        bl.plan(bnn, bl.Budget(parameters=57))


def test_bytes_left(bnn):
    dense = stored_bytes(dict(bnn.mean_network().state_dict()))
    plan = bl.plan(bnn, bl.Budget(bytes=0.7 * dense))
    network = bl.prune(bnn, plan).mean_network()
    size = stored_bytes(dict(network.state_dict()))
    assert size <= 0.7 * dense
    fewer = bl.plan(bnn, bl.Budget(sparsity=(plan.cut - 2) / 48))
    assert stored_bytes(dict(bl.prune(bnn, fewer).mean_network().state_dict())) > 0.7 * dense


def test_flops_left(bnn):
    network = bnn.mean_network()
    assert price.flops_by_parameter(network, EXAMPLE) == {"0.weight": 2 * 2 * 30, "2.weight": 2 * 2 * 18}
    plan = bl.plan(bnn, bl.Budget(flops=100), example=EXAMPLE)
    assert 4 * (48 - plan.cut) <= 100 < 4 * (49 - plan.cut)


@pytest.mark.parametrize(
    ("build", "example"),
    [
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2)), torch.zeros(2, 2, 6, 6)),
        (lambda: nn.LSTM(3, 5, num_layers=2), torch.zeros(4, 2, 3)),
        (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.ConvTranspose1d(3, 2, 2)), torch.zeros(1, 2, 7)),
    ],
)
def test_flops_belong_to_the_weights_that_take_part(build, example):
    model = build()
    found = price.flops_by_parameter(model, example)
    assert sum(found.values()) == cost(model, example).flops
    assert all(model.get_parameter(name).ndim > 1 for name in found)


def test_flops_of_attention_are_never_understated():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(1, 5, 8)
    found = price.flops_by_parameter(model, (x, x, x))
    assert found == {"in_proj_weight": 2 * 5 * 8 * 24, "out_proj.weight": 2 * 5 * 8 * 8}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("criterion", ["curvature", "magnitude", "savage_dickey"])
def test_units_are_cut_whole(family, criterion):
    model = two_layers(hidden=12)
    bnn = given(model, FAMILIES[family](model))
    plan = bl.plan(bnn, bl.Budget(sparsity=0.5), granularity="unit", criterion=criterion, example=EXAMPLE)
    gone = ~plan.masks["0.bias"]
    assert 0 < int(gone.sum()) < 12
    assert torch.equal(plan.masks["0.weight"], (~gone)[:, None].expand(12, 5))
    assert torch.equal(plan.masks["2.weight"], (~gone).expand(3, 12))
    assert torch.equal(plan.unread["0.bias"], gone)
    assert plan.sparsity >= 0.5 > plan.sparsity - 1 / 12
    assert "output of the network" in repr(plan)


def test_units_go_by_joint_cost_for_each_weight():
    model = two_layers()
    bnn = given(model, kronecker(model))
    graph_units = [
        {"0.weight": torch.arange(5 * u, 5 * u + 5), "0.bias": torch.tensor([u]), "2.weight": torch.arange(u, 18, 6)}
        for u in range(6)
    ]
    costs = bl.posteriors.group_saliency(bnn.posterior_, graph_units)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.3), granularity="unit", example=EXAMPLE)
    gone = ~plan.masks["0.bias"]
    assert set(gone.nonzero().flatten().tolist()) == set(costs.argsort()[: int(gone.sum())].tolist())
    below = bl.plan(
        bnn, bl.Budget(threshold=float(costs.median()) + 1e-9), granularity="unit", criterion="curvature",
        example=EXAMPLE,
    )  # fmt: skip
    assert torch.equal(~below.masks["0.bias"], costs <= costs.median())


def test_unit_budgets_are_those_of_the_compacted_network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )
    model(torch.randn(20, 1, 8, 8))
    x = torch.randn(2, 1, 8, 8)
    bnn = given(model.eval(), diagonal(model))
    dense = cost(model, x)
    for goal, value in (
        ("parameters", dense.parameters // 2),
        ("flops", dense.flops // 2),
        ("bytes", dense.bytes // 2),
    ):
        plan = bl.plan(bnn, bl.Budget(**{goal: value}), granularity="unit", example=x)
        slim = compact_network(bnn.mean_network(), dict(plan.masks), x)
        assert getattr(cost(slim, x), goal) <= value
        left = sum(p.numel() for p in model.parameters()) - plan.cut
        assert sum(p.numel() for p in slim.parameters()) == left
        assert getattr(cost(slim, x), goal) > 0.6 * value


def test_protected_layers_keep_their_units():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 2)).double()
    bnn = given(model, diagonal(model))
    plan = bl.plan(bnn, bl.Budget(sparsity=0.5, protect=["2"]), granularity="unit", example=EXAMPLE)
    assert plan.left["2"] == "protected"
    assert "2.bias" not in plan.masks
    assert not bool(plan.masks["2.weight"].all())
    # half of the 44 weights that count are five units of 5 weights; with the protected 42, four of 5 + 7 would be half
    assert int((~plan.masks["0.weight"]).sum()) == 25


def test_latency_is_measured(bnn, monkeypatch):
    seen = []

    def seconds(network, example):
        seen.append(network)
        return float(sum(p.numel() for p in network.parameters()))

    monkeypatch.setattr(price, "seconds_a_call", seconds)
    plan = bl.plan(bnn, bl.Budget(latency=40.0), granularity="unit", example=EXAMPLE)
    assert 57 - plan.cut == 39  # nine parameters a unit
    assert len(seen) > 1
    with pytest.raises(ValueError, match="granularity"):
        bl.plan(bnn, bl.Budget(latency=40.0), example=EXAMPLE)
    with pytest.raises(EmptyLayer, match="12 s"):
        bl.plan(bnn, bl.Budget(latency=1.0, empty_layers="refuse"), granularity="unit", example=EXAMPLE)


def test_a_call_takes_time():
    assert 0 < price.seconds_a_call(nn.Linear(4, 4), torch.zeros(1, 4), at_least=0.001) < 1


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (3, 8)])
def test_patterns_keep_the_best_of_every_block(n, m):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ConvTranspose2d(8, 6, 2), nn.Linear(16, 3), nn.Linear(6, 2)).double()
    bnn = given(model, diagonal(model))
    plan = bl.plan(bnn, granularity=f"{n}:{m}")
    scores = criteria.snr.snr(bnn.posterior_, {})
    for name, dim in (("0.weight", 1), ("1.weight", 0), ("2.weight", 1)):
        blocks = plan.masks[name].movedim(dim, -1).unflatten(-1, (-1, m))
        assert bool((blocks.sum(-1) == n).all())
        of_blocks = scores[name].movedim(dim, -1).unflatten(-1, (-1, m))
        worst_kept = of_blocks.masked_fill(~blocks, torch.inf).amin(-1)
        best_cut = of_blocks.masked_fill(blocks, -torch.inf).amax(-1)
        assert bool((best_cut <= worst_kept).all())
    if 6 % m:
        assert "no multiple" in plan.left["3.weight"]
    assert plan.sparsity == pytest.approx(1 - n / m)
    assert bl.plan(bnn, bl.Budget(sparsity=1 - n / m), granularity=f"{n}:{m}").masks.keys() == plan.masks.keys()


def test_patterns_within_a_budget_take_whole_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)).double()
    bnn = given(model, diagonal(model))
    bnn.posterior_.std["1.weight"].mul_(100)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.1), granularity="2:4")
    assert [p.kept for p in plan.parameters] == [32, 8]
    assert "above the cut" in plan.left["0.weight"]


def test_a_cut_already_made_counts(bnn):
    half = bl.prune(bnn, bl.Budget(sparsity=0.5))
    plan = bl.plan(half, bl.Budget(sparsity=0.75))
    assert plan.sparsity == 0.75
    assert all(not bool((plan.masks[n] & ~m).any()) for n, m in half.masks.items())
    with pytest.raises(NothingToCut, match="24 of 48 are cut already"):
        bl.plan(half, bl.Budget(sparsity=0.4))
    layered = bl.plan(half, bl.Budget(sparsity=0.75, scope="layer"))
    assert layered.sparsity == 0.75


@pytest.mark.parametrize(("what", "value"), [("mean", torch.nan), ("mean", torch.inf), ("std", torch.nan)])
def test_nan_is_refused(bnn, what, value):
    getattr(bnn.posterior_, what)["0.weight"][0, 0] = value
    with pytest.raises(BayeslimError, match=r'"0\.weight" holds NaN'):
        bl.plan(bnn, bl.Budget(sparsity=0.5))


def test_a_criterion_that_gives_nan_is_refused(bnn):
    with pytest.raises(BayeslimError, match="NaN"):
        bl.plan(
            bnn,
            bl.Budget(sparsity=0.5),
            criterion=lambda posterior, priors: {n: m * torch.nan for n, m in posterior.mean.items()},
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"granularity": "unit"}, "example=x"),
        ({"granularity": "row"}, "granularity"),
        ({"granularity": "4:2"}, "0 < N < M"),
        ({"granularity": None}, "granularity"),
        ({"criterion": "log_alpha", "granularity": "unit", "example": EXAMPLE}, "single weights"),
        ({"granularity": "3:7"}, "pattern"),
        ({"granularity": "unit", "example": torch.zeros(1, 9).double()}, "does not run"),
    ],
)
def test_what_cannot_be_decided_is_refused(bnn, options, words):
    with pytest.raises((ValueError, TypeError, BayeslimError), match=words):
        bl.plan(bnn, bl.Budget(sparsity=0.5), **options)


@pytest.mark.parametrize("budget", [None, 0.5, bl.Budget(flops=10), bl.Budget(max_error_increase=1.0)])
def test_a_plan_needs_what_its_budget_needs(bnn, budget):
    with pytest.raises((ValueError, TypeError), match=r"budget|example|validate"):
        bl.plan(bnn, budget)


def test_a_plain_network_is_not_bayesian():
    with pytest.raises(TypeError, match="bayesianize"):
        bl.plan(two_layers(), bl.Budget(sparsity=0.5))


def test_planning_changes_nothing(bnn):
    before = {n: p.clone() for n, p in bnn.named_parameters()}
    state = torch.get_rng_state()
    bl.plan(bnn, bl.Budget(sparsity=0.5), granularity="unit", example=EXAMPLE)
    assert all(torch.equal(p, before[n]) for n, p in bnn.named_parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert bnn.masks == {}


@forall(st.integers(0, 500), st.integers(0, 500))
def test_searches_find_the_edge(edge, size):
    size = max(edge, size)
    assert fewest(lambda count: size - count, size - edge, 0, size) == edge
    found = most(lambda count: count <= edge, 0, size, size)
    assert found <= edge
    assert size - found <= (size - edge) * 1.05 + 1


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        (lambda q, p: 3, "gave NoneType"),
        (lambda q, p: {}, "gave NoneType"),
        (lambda q, p: {n: m.sum(0) for n, m in q.mean.items()}, r"of shape \(6, 5\) .* gave \(5,\)"),
        (lambda q, p: {n: m.tolist() for n, m in q.mean.items()}, "gave list"),
    ],
)
def test_a_criterion_that_gives_no_scores_is_told_what_to_give(bnn, scores, got):
    with pytest.raises(BayeslimError, match=f"a score for every weight.*{got}"):
        bl.plan(bnn, bl.Budget(sparsity=0.5), criterion=scores)


def test_a_criterion_gives_one_score_a_unit(bnn):
    short = Criterion("short", criteria.snr.snr, lambda q, p, groups: torch.zeros(2))
    with pytest.raises(BayeslimError, match=r"one score a unit, 6. short gave \(2,\)"):
        bl.plan(bnn, bl.Budget(sparsity=0.5), granularity="unit", criterion=short, example=EXAMPLE)


def test_nothing_is_left_for_any_of_several_steps():
    model = two_layers(inputs=4)
    pruned = bl.prune(given(model, diagonal(model)), bl.plan(given(model, diagonal(model)), granularity="1:2"))
    with pytest.raises(NothingToCut, match="cut already"):
        bl.prune(pruned, bl.Budget(sparsity=0.5), granularity="1:2", steps=3)


@forall(st.integers(0, 10_000), st.floats(0.05, 0.95))
@settings(max_examples=20, deadline=None)
def test_a_global_cut_leaves_every_layer_some_capacity(seed, fraction):
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, 40, 200]
    layers = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    scores = torch.rand(len(layers), generator=generator, dtype=torch.float64) * torch.tensor([1e-6, 1.0, 10.0])[layers]
    candidates = Candidates(
        scores=scores,
        ties=torch.zeros_like(scores),
        sizes=torch.ones_like(layers),
        layers=layers,
        layer_names=("a", "b", "c"),
        gone=torch.zeros_like(layers, dtype=torch.bool),
        masks=lambda cut: {},
        weights=(),
        left={},
    )
    plain = rank(candidates, "global", keep_best=False)
    ranking = rank(candidates, "global", keep_best=True, min_capacity=0.25)
    count = round(fraction * len(layers))
    cut = ranking.cut(count)
    kept = torch.tensor(sizes) - torch.bincount(layers[cut], minlength=3)
    left = 1 - len(cut) / len(layers)
    assert bool((kept >= torch.floor(0.25 * left * torch.tensor(sizes)).clamp(min=1)).all())
    assert bool((kept >= 1).all())
    for layer in range(3):  # within a layer the order is that of the scores
        inside = ranking.order[layers[ranking.order] == layer]
        assert torch.equal(inside, plain.order[layers[plain.order] == layer][: len(inside)])


def test_a_pattern_in_steps_takes_one_weight_of_every_block_first():
    model = two_layers(inputs=8, hidden=8, outputs=4)
    bnn = given(model, kronecker(model))
    whole = bl.plan(bnn, granularity="2:4")
    scores = CRITERIA["curvature"](bnn.posterior_, bnn.priors)
    for share in (0.2, 0.415, 0.7):  # a quarter of the weights is gone at log(3/4) / log(1/2) = 0.415 of the way
        part = decide(bnn, bl.Budget(sparsity=0.5), Settings("2:4"), share=share)
        assert part.sparsity == pytest.approx(1 - 0.5**share, abs=0.02)
        for name, mask in part.masks.items():
            assert bool((whole.masks[name] <= mask).all())  # nothing goes that the pattern keeps
            left = mask.unflatten(1, (-1, 4)).sum(-1)
            assert int(left.min()) >= (3 if share < 0.415 else 2)
            if share > 0.415:
                assert int(left.max()) <= 3
            lowest = scores[name].unflatten(1, (-1, 4)).argmin(-1, keepdim=True)
            first = mask.unflatten(1, (-1, 4)).gather(-1, lowest)
            assert not bool(first[left < 4].any())
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), granularity="2:4", steps=3)
    for mask in pruned.plan_.masks.values():
        assert bool((mask.unflatten(1, (-1, 4)).sum(-1) == 2).all())


def test_parameters_that_an_earlier_cut_took_count_as_gone():
    """Biases of units that are gone are no candidates of the next cut."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, y)], epochs=1, seed=0, progress=False)
    units = bl.prune(bnn, bl.Budget(sparsity=0.75), granularity="unit", example=x)
    less = bl.prune(units, bl.Budget(parameters=60))
    left = sum(p.numel() for p in network.parameters()) - sum(int((~mask).sum()) for mask in less.masks.values())
    assert left == 60


def test_yes_or_no_targets_are_searched_on():
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    data = [(x, x[:, :1] > 0)]
    bnn = bl.bayesianize(nn.Linear(6, 1), bl.Laplace(), likelihood=bl.likelihoods.Bernoulli())
    bnn.fit(data, epochs=50, lr=0.1, progress=False)
    assert bl.prune(bnn, bl.Budget(max_error_increase=5.0), validate=data).masks
