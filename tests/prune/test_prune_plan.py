import copy
import json
import pickle

import pytest
import torch
from given_posteriors import diagonal, given, two_layers
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
from bayeslim.errors import CorruptFile, NoSiteMatched, ShapeMismatch
from bayeslim.prune import EmptyLayer, NothingToCut, Plan


def plan_of(shapes, seed=0, unread=True):
    generator = torch.Generator().manual_seed(seed)
    masks = {f"layer{i}.weight": torch.rand(s, generator=generator) < 0.4 for i, s in enumerate(shapes)}
    gone = {n: ~m & (torch.rand(m.shape, generator=generator) < 0.5) for n, m in masks.items()} if unread else {}
    return Plan(masks, "snr", "unit", "Budget(sparsity=0.6)", {"layer0.weight": 0.25}, {"bias": "bias"}, gone)


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=3)


@forall(SHAPES, st.integers(0, 100), st.text(max_size=5))
@settings(max_examples=20, deadline=None)
def test_json_gives_the_plan_back(shapes, seed, words):
    plan = plan_of(shapes, seed)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert all(torch.equal(again.masks[n], m) and again.masks[n].dtype == torch.bool for n, m in plan.masks.items())
    noted = Plan(plan.masks, words, left={words: words})
    assert Plan.from_json(noted.to_json()) == noted
    assert json.loads(plan.to_json())["masks"].keys() == plan.masks.keys()


def test_masks_are_stored_compactly():
    mask = torch.zeros(300, 784, dtype=torch.bool)
    mask[:20] = True
    assert len(Plan({"w": mask}).to_json()) < 1000


def damaged():
    """List texts of plans, each damaged in one respect."""
    good = json.loads(plan_of([(3, 4)]).to_json())
    mask = good["masks"]["layer0.weight"]

    def but(**changes):
        return json.dumps(good | changes)

    yield from ("", "{", "null", "[]", "3", '{"format": "x"}', "[" * 100_000)
    yield but(version=1)
    yield but(extra=1)
    yield json.dumps({k: v for k, v in good.items() if k != "left"})
    yield but(criterion=3)
    yield but(left={"a": 1})
    yield but(left=[])
    yield but(thresholds={"a": "high"})
    yield json.dumps(good | {"thresholds": {"a": float("nan")}})
    yield but(thresholds={"a": 10**400})
    for kept in (3, "", "!!", mask["kept"][:-8], mask["kept"] + "AAAA", "AAAA", "é"):
        yield but(masks={"layer0.weight": mask | {"kept": kept}})
    for shape in ("3x4", [3, 5], [3, -4], [3.0, 4], [True, 4], [3, 4, 10**12], [0], [40], [1] * 40, None):
        yield but(masks={"layer0.weight": mask | {"shape": shape}})
    yield but(masks={"layer0.weight": mask | {"more": 1}})
    yield but(masks={"layer0.weight": 7})
    yield but(masks=[])
    yield but(unread={"layer0.weight": mask})
    yield but(unread={"layer9.weight": mask})


@pytest.mark.parametrize("text", list(damaged()), ids=lambda text: text[:20] or "empty")
def test_hostile_json_is_refused(text):
    with pytest.raises(CorruptFile):
        Plan.from_json(text)


def test_a_plan_is_frozen_and_its_own():
    mask = torch.tensor([True, False])
    plan = Plan({"w": mask})
    mask[:] = True
    assert plan.cut == 1
    with pytest.raises(AttributeError):
        plan.criterion = "snr"
    with pytest.raises(TypeError):
        plan.masks["w"] = mask
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("masks", [{"w": [True]}, {"w": torch.ones(3)}, {3: torch.ones(3, dtype=torch.bool)}])
def test_masks_are_boolean_tensors_by_name(masks):
    with pytest.raises(TypeError, match="boolean"):
        Plan(masks)


def test_unread_weights_are_cut_weights():
    with pytest.raises(ValueError, match="unread"):
        Plan({"w": torch.tensor([True, False])}, unread={"w": torch.tensor([True, False])})


def test_equality_is_of_contents():
    assert plan_of([(3, 4)], 1) == plan_of([(3, 4)], 1)
    assert plan_of([(3, 4)], 1) != plan_of([(3, 4)], 2)
    assert plan_of([(3, 4)], 1) != "plan"


def test_merged_plans_cut_what_either_cuts():
    a, b = plan_of([(3, 4)], 1), plan_of([(3, 4), (2, 2)], 2)
    both = a.merge(b)
    assert torch.equal(both.masks["layer0.weight"], a.masks["layer0.weight"] & b.masks["layer0.weight"])
    assert torch.equal(both.masks["layer1.weight"], b.masks["layer1.weight"])
    assert torch.equal(both.unread["layer0.weight"], a.unread["layer0.weight"] | b.unread["layer0.weight"])
    assert {n: m.tolist() for n, m in b.merge(a).masks.items()} == {n: m.tolist() for n, m in both.masks.items()}
    assert a.merge(a) == Plan(a.masks, a.criterion, a.granularity, a.budget, left=a.left, unread=a.unread)
    with pytest.raises(ShapeMismatch, match="different models"):
        a.merge(plan_of([(4, 3)]))


def test_cuts_can_be_undone_by_layer():
    plan = plan_of([(3, 4), (2, 2)])
    for names in (("layer0",), ("layer0.weight",), ("layer0.*",)):
        left = plan.undo(*names)
        assert bool(left.masks["layer0.weight"].all())
        assert torch.equal(left.masks["layer1.weight"], plan.masks["layer1.weight"])
        assert "undone" in left.left["layer0.weight"]
    with pytest.raises(NoSiteMatched, match=r"layer0\.weight"):
        plan.undo("layer7")


def test_a_plan_tightens_on_the_network_it_is_for():
    model = two_layers()
    bnn = given(model, diagonal(model))
    loose = bl.plan(bnn, bl.Budget(sparsity=0.3), criterion="magnitude")
    tight = loose.tighten(bnn, bl.Budget(sparsity=0.7))
    assert tight.criterion == "magnitude"
    assert tight.sparsity == pytest.approx(0.7, abs=1 / 48)
    assert all(not bool((tight.masks[n] & ~m).any()) for n, m in loose.masks.items())
    other = loose.tighten(bnn, bl.Budget(sparsity=0.7), criterion="snr")
    assert other.criterion == "snr"
    assert all(not bool((other.masks[n] & ~m).any()) for n, m in loose.masks.items())
    with pytest.raises(NothingToCut, match="already"):
        loose.tighten(bnn, bl.Budget(sparsity=0.1))


def test_a_plan_knows_its_model():
    plan = Plan({"0.weight": torch.rand(6, 5) < 0.5})
    plan.check(two_layers())
    with pytest.raises(ShapeMismatch, match="another model"):
        plan.check(two_layers(hidden=7))
    with pytest.raises(ShapeMismatch, match="another model"):
        plan.check(nn.Linear(5, 6))
    with pytest.raises(NothingToCut):
        Plan({"0.weight": torch.ones(6, 5, dtype=torch.bool)}).check(two_layers())
    with pytest.raises(NothingToCut):
        Plan({}).check(two_layers())
    with pytest.raises(EmptyLayer, match="keep best"):
        Plan({"0.weight": torch.zeros(6, 5, dtype=torch.bool)}).check(two_layers())


def test_it_prints_as_a_table_with_reasons():
    model = two_layers()
    shown = repr(bl.plan(given(model, diagonal(model)), bl.Budget(sparsity=0.5, protect=["2"])))
    assert "50.00 % of the weights go (15 parameters of 30), by snr of each weight for Budget(sparsity=0.5" in shown
    lines = {line.split()[0]: line for line in shown.splitlines()[1:]}
    assert "30 -> 15" in lines["0.weight"]
    assert "score ≥" in lines["0.weight"]
    assert lines["2.weight"].endswith("protected")
    assert lines["0.bias"].endswith("bias")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one"),
        ({"sparsity": 0.5, "parameters": 10}, "exactly one"),
        ({"sparsity": 1.0}, "between 0 and 1"),
        ({"sparsity": 0}, "between 0 and 1"),
        ({"sparsity": float("nan")}, "a number"),
        ({"sparsity": "0.5"}, "a number"),
        ({"parameters": True}, "a number"),
        ({"parameters": 0}, "positive"),
        ({"flops": -1}, "positive"),
        ({"bytes": float("inf")}, "finite"),
        ({"latency": 0.0}, "positive"),
        ({"max_error_increase": -0.1}, "negative"),
        ({"evidence": 1}, "True"),
        ({"sparsity": 0.5, "scope": "all"}, "scope"),
        ({"threshold": 0.0, "scope": "layer"}, "scope"),
        ({"sparsity": 0.5, "protect": "fc1"}, "list"),
        ({"sparsity": 0.5, "empty_layers": "ok"}, "keep best"),
    ],
)
def test_a_budget_has_one_valid_goal(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        bl.Budget(**options)


def test_a_budget_names_its_goal():
    assert bl.Budget(threshold=0.0).goal == "threshold"
    assert bl.Budget(evidence=True).goal == "evidence"
    assert bl.Budget(max_error_increase=0).value == 0
    assert repr(bl.Budget(bytes=1000, scope="layer")) == "Budget(bytes=1000, scope='layer')"


def test_a_plan_by_hand_tightens_by_the_default_and_one_by_a_function_asks_for_it():
    model = two_layers()
    bnn = given(model, diagonal(model))
    first = torch.ones(6, 5, dtype=torch.bool)
    first[0, 0] = False
    by_hand = Plan({"0.weight": first})
    tight = by_hand.tighten(bnn, bl.Budget(sparsity=0.5))
    assert tight.criterion == "snr"
    assert not tight.masks["0.weight"][0, 0]

    def mine(posterior, priors):
        return {name: mean.abs() for name, mean in posterior.mean.items()}

    made = bl.plan(bnn, bl.Budget(sparsity=0.3), criterion=mine)
    with pytest.raises(ValueError, match=r'made by "mine".*Pass criterion='):
        made.tighten(bnn, bl.Budget(sparsity=0.5))
    assert made.tighten(bnn, bl.Budget(sparsity=0.5), criterion=mine).cut == 24
    mixed = made.merge(bl.plan(bnn, bl.Budget(sparsity=0.3), granularity="1:2", criterion=mine))
    with pytest.raises(ValueError, match=r"Pass the granularity="):
        mixed.tighten(bnn, bl.Budget(sparsity=0.9), criterion=mine)


def test_a_pattern_that_is_none_undoes_nothing():
    with pytest.raises(NoSiteMatched, match=r"undo\('0\.\('\) is neither a name nor a regular expression"):
        plan_of([(3, 2)]).undo("0.(")


def test_a_start_for_another_model_is_refused_before_anything():
    model = two_layers()
    pruned = bl.prune(given(model, diagonal(model)), bl.Budget(sparsity=0.3))
    with pytest.raises(ShapeMismatch, match=r'its mask of "0.weight" is \(4, 5\)'):
        bl.plan(pruned, bl.Budget(sparsity=0.5), start=Plan({"0.weight": torch.rand(4, 5) < 0.5}))


def test_parametrized_units_that_stay_come_with_the_remedy():
    def network() -> nn.Sequential:
        hidden = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        return nn.Sequential(hidden, nn.ReLU(), nn.Linear(6, 2))

    def plan_units(model: nn.Module) -> Plan:
        bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical())
        return bl.plan(bnn, bl.Budget(sparsity=0.3), granularity="unit", example=torch.randn(3, 4))

    model = network()
    with pytest.raises(bl.errors.BayeslimError, match="remove_parametrizations"):
        plan_units(model)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert plan_units(model).granularity == "unit"
