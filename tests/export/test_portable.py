"""Graphs as JSON: right on every architecture, and nothing in a hostile one is ever run."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from small_networks import Length, TwoInputs, architectures, mlp
from torch import fx, nn

from bayeslim.compact.example import batches, tensors_in
from bayeslim.errors import CorruptFile, UnsupportedModel
from bayeslim.export.check import difference
from bayeslim.export.operations import function, name_of
from bayeslim.export.portable import as_graph, build, describe

networks = architectures()
VARIED = ["unet", "lstm_stacked", "gru_cell", "language_gqa_glu", "shared_module", "custom_layers"]


def through_json(network: nn.Module, example) -> fx.GraphModule:
    program, tensors = describe(as_graph(network, batches(network, example)))
    return build(json.loads(json.dumps(program)), {name: t.detach().clone() for name, t in tensors.items()})


@pytest.mark.parametrize("name", VARIED)
def test_architectures_come_back(name):
    network, example = networks.build(name)
    again = through_json(network, example)
    sizes = batches(network, example)
    assert len(sizes) == 2
    for inputs in sizes:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        with torch.no_grad():
            assert difference(tensors_in(network(*args)), tensors_in(again(*args))) < 1e-12


def test_simple_networks_are_traced_once_and_nothing_is_left_that_works_in_place(monkeypatch):
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout())
    x = torch.randn(2, 1, 5, 5)
    with monkeypatch.context() as patch:
        patch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
        graph = as_graph(network.eval(), [x])
    operations = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not any(operation._schema.is_mutable for operation in operations)
    torch.testing.assert_close(graph(x), network(x))
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten()).eval()  # which writes to what it is given
    before = x.clone()
    torch.testing.assert_close(through_json(first, x)(x), x.relu().flatten(1))
    assert torch.equal(x, before)


def test_names_inputs_and_parameters_are_those_of_the_network():
    network = TwoInputs()
    again = through_json(network, {"left": torch.randn(2, 3), "right": torch.randn(2, 5)})
    assert set(again.state_dict()) == set(network.state_dict())
    assert {name for name, _ in again.named_parameters()} == {name for name, _ in network.named_parameters()}
    left, right = torch.randn(7, 3), torch.randn(7, 5)
    out = again(right=right, left=left)
    assert list(out) == ["both", "sum"]
    torch.testing.assert_close(out, network(left, right))
    assert not again.training


def test_a_batch_size_from_len_stays_free():
    network = Length()
    again = through_json(network, torch.randn(2, 4))
    x = torch.randn(5, 4)
    torch.testing.assert_close(again(x), network(x))


def test_gradients_flow_through_a_loaded_graph():
    again = through_json(mlp(), torch.randn(2, 6))
    again(torch.randn(4, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


def test_a_graph_needs_no_example_and_anything_else_does():
    graph = as_graph(mlp(), batches(mlp(), torch.randn(2, 6)))
    assert as_graph(graph, []) is graph
    with pytest.raises(UnsupportedModel, match="example=x"):
        as_graph(mlp(), [])


def test_what_is_not_in_the_table_is_refused_when_writing():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.fbgemm_pack_gemm_matrix_fp16.default, (x,)))
    with pytest.raises(UnsupportedModel, match="fbgemm"):
        describe(fx.GraphModule(nn.Module(), graph))


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.relu_.default",
        "aten.add.out",
        "aten.fbgemm_linear_fp16_weight.default",
        "aten.as_strided.default",
        "aten.set_.source_Tensor",
        "aten._cudnn_init_dropout_state.default",
        "aten.linear",
        "aten.linear.__class__",
        "aten.__class__.default",
        "aten.",
        "prim.Print.default",
        "size.__import__",
        "size.attrgetter",
        "size.pow",
        "os.system",
        "",
        None,
        7,
        ["aten.relu.default"],
    ],
)
def test_operations_that_are_not_safe(name):
    with pytest.raises(CorruptFile, match="not in the table"):
        function(name)


def test_the_table_speaks_both_ways():
    for op in (torch.ops.aten.linear.default, torch.ops.aten.conv2d.default, torch.ops.aten.gelu.default):
        assert function(name_of(op)) is op
    assert name_of(torch.ops.aten.relu_.default) is None
    assert name_of(eval) is None


GOOD, TENSORS = describe(as_graph(mlp(), batches(mlp(), torch.randn(2, 6))))
EVIL = '__import__("os").abort()'


def edited(change) -> dict:
    program = json.loads(json.dumps(GOOD))
    change(program)
    return program


def first(program, kind):
    return next(step for step in program["steps"] if kind in step)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.clear(),
        lambda p: p.update(steps=None),
        lambda p: p.update(steps="steps"),
        lambda p: p.update(steps=[None]),
        lambda p: p.update(steps=["input"]),
        lambda p: p.update(steps=[{}]),
        lambda p: p.update(name=EVIL),
        lambda p: p.update(name="a b"),
        lambda p: p.update(name=None),
        lambda p: p.update(output={"$step": 999}),
        lambda p: p.update(output={"$step": -1}),
        lambda p: p.update(output={"$step": True}),
        lambda p: p.update(output={"$step": "0"}),
        lambda p: p.update(output={"$eval": EVIL}),
        lambda p: p.update(output={"$torch": "load"}),
        lambda p: p.update(output={"$torch": "ops"}),
        lambda p: p.update(output={"$device": EVIL}),
        lambda p: p.update(output={"$step": 0, "$tuple": []}),
        lambda p: p.update(output={}),
        lambda p: p.pop("output"),
        lambda p: p.pop("parameters"),
        lambda p: p.update(parameters=7),
        lambda p: first(p, "input").update(input=EVIL),
        lambda p: first(p, "input").update(input="x, y=" + EVIL),
        lambda p: first(p, "input").update(input="self"),
        lambda p: first(p, "input").update(input="lambda"),
        lambda p: first(p, "input").update(input="*args"),
        lambda p: first(p, "input").update(input=""),
        lambda p: p["steps"].append(dict(first(p, "input"))),
        lambda p: first(p, "tensor").update(tensor="missing"),
        lambda p: first(p, "tensor").update(tensor=EVIL),
        lambda p: first(p, "tensor").update(tensor='a"]; ' + EVIL),
        lambda p: first(p, "tensor").update(tensor=["0.weight"]),
        lambda p: first(p, "call").update(call="aten.from_file.default"),
        lambda p: first(p, "call").update(args={"$step": 0}),
        lambda p: first(p, "call").update(args=7),
        lambda p: first(p, "call").pop("args"),
        lambda p: first(p, "call").update(kwargs={EVIL: 1}),
        lambda p: first(p, "call").update(kwargs=[1]),
        lambda p: first(p, "call").update(args=[{"$step": 10**6}]),
    ],
)
def test_hostile_graphs(change):
    with pytest.raises(CorruptFile):
        build(edited(change), TENSORS)


def test_hostile_names_of_tensors_that_exist():
    for name in ("forward", "0.__class__", "..", "a b", 'x"]', "training"):
        program = edited(lambda p, name=name: first(p, "tensor").update(tensor=name))
        with pytest.raises(CorruptFile):
            build(program, dict(TENSORS) | {name: torch.zeros(2)})


def test_deep_nesting_is_refused():
    value: dict = {"$step": 0}
    for _ in range(5000):
        value = {"$tuple": [value]}
    program = copy.copy(GOOD) | {"output": value}
    with pytest.raises(CorruptFile):
        build(program, TENSORS)


def test_strings_are_only_ever_strings():
    program = edited(lambda p: p.update(output={"$tuple": [EVIL, "'''", '\\"; ' + EVIL]}))
    assert build(program, TENSORS)(torch.randn(2, 6)) == (EVIL, "'''", '\\"; ' + EVIL)
