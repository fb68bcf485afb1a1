"""A network as a graph of tensor operations, traced with `torch.export`.

The graph is functional (no operation works in place) and keeps operations whole (linear, convolution, LSTM, attention).
Its sizes are dynamic where the network allows it, so that it can be the compacted network when the user's own module
cannot.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bayeslim.compact.example import batches, run_example
from bayeslim.compact.guards import Guard, all_hold, guards_of
from bayeslim.compact.ops import read_call, words
from bayeslim.compact.program import exported
from bayeslim.compact.quiet import one_thread_at_a_time, quiet
from bayeslim.compact.recurrence import restore_recurrent_
from bayeslim.errors import UnsupportedModel
from bayeslim.types import Inputs, arguments, to_device

M = TypeVar("M", nn.Module, fx.Graph)
_aten = torch.ops.aten
DECOMPOSED = tuple(
    op.default for op in (_aten.einsum, _aten.lstm_cell, _aten.gru_cell, _aten.rnn_tanh_cell, _aten.rnn_relu_cell)
)
"""Operations that the graph shows as the simpler operations they consist of."""
_ATTENTION_KERNELS = (
    _aten._scaled_dot_product_attention_math.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_ATTENTION: dict[str, Any] = {
    **dict.fromkeys(("query", "key", "value", "attn_mask")),
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
"""The arguments of attention, and their defaults."""
_FRESH = words(
    "linear conv1d conv2d conv3d conv_transpose2d batch_norm add mul sub div matmul bmm max_pool2d cat relu zeros_like "
    "masked_fill"
)
"""Operations whose result shares no memory with anything else."""


@dataclass(frozen=True)
class Trace:
    """A network's graph and the inputs it was traced on.

    Attributes:
        module: the graph with the network's tensors under their own names, in eval mode.
        inputs: the flat inputs, one for each placeholder.
        example: the same inputs in the network's format.
        names: every parameter's and buffer's names by the one that the graph uses (tied tensors have several).
        fixes_batch: whether the graph takes one batch size only, though the network takes others.
        guards: the conditions on the inputs under which the graph is valid.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    example: Inputs
    names: dict[str, tuple[str, ...]]
    fixes_batch: bool
    guards: tuple[Guard, ...]

    @cached_property
    def fixed_sizes(self) -> frozenset[Any]:
        """The expanded symbolic sizes that guards of the trace set to a number."""
        values = [node.meta.get("val") for node in self.module.graph.nodes if node.op == "placeholder"]
        sizes: list[Any] = [size for value in values if isinstance(value, Tensor) for size in value.shape]
        environment = next((size.node.shape_env for size in sizes if not isinstance(size, int)), None)
        equations = [guard.expr for guard in environment.guards if guard.expr.is_Equality] if environment else []
        sides = [side for equation in equations for side in (equation.args, equation.args[::-1])]
        return frozenset(size.expand() for size, number in sides if number.is_Integer and not size.is_Integer)


@one_thread_at_a_time
def trace(model: nn.Module, example: Inputs) -> Trace:
    """Trace a copy of `model` in eval mode on the CPU.

    Raises:
        ShapeMismatch: if the network does not run on the example.
        UnsupportedModel: if `torch.export` cannot trace it.
    """
    network = evaluating_copy(model).cpu()
    example = to_device(example, "cpu")
    inputs = batches(network, example)
    if len(inputs) == 1:
        run_example(network, example)
    program = exported(network, inputs)
    guards = guards_of(program, network, inputs[0])
    fixed = not all(all_hold(guards, pytree.tree_leaves(arguments(other))) for other in inputs[1:])
    with quiet():
        module = functional(program)
    whole = pytree.tree_leaves(arguments(example))
    if _selects_by_value(module.graph) and all_hold(guards, whole):
        inputs = [example]  # a few rows may leave an expert without any
    args, kwargs = arguments(inputs[0])
    leaves = tuple(pytree.tree_leaves((args, kwargs)))
    if program.call_spec.out_spec.is_leaf() and len(leaves) == len(args) + len(kwargs):
        module = _with_plain_signature(module)
    return Trace(module, leaves, inputs[0], _aliases(network, module), fixed, guards)


def _selects_by_value(graph: fx.Graph) -> bool:
    """Return whether a tensor's size depends on values, as that of `nonzero`."""
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # sympy takes long to import

    values = (node.meta.get("val") for node in graph.nodes)
    return any(has_free_unbacked_symbols(value) for value in values if isinstance(value, Tensor))


def quiet_copy(model: M) -> M:
    """Make a deep copy without PyTorch's warnings about the signatures of graphs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(model)


def evaluating_copy(model: nn.Module) -> nn.Module:
    """Make a deep copy of a model in eval mode."""
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UnsupportedModel(
            f"{type(model).__name__} has lazy parameters without a shape. Call it once on a batch first."
        )
    try:
        return quiet_copy(model).eval()
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied: {error}. "
            "Remove tensors with a gradient history that it keeps as attributes."
        ) from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, tied ones under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def constants_of(trace: Trace, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a graph that are neither parameters nor buffers, by name."""
    registered = tensors_of(model)
    found = {}
    for name in trace.names:
        if name not in registered:
            owner, _, attribute = name.rpartition(".")
            value = getattr(trace.module.get_submodule(owner), attribute)
            found.update({name: value} if isinstance(value, Tensor) else {})
    return found


class Walker(fx.Interpreter):
    """A run of a trace that shows every node and its result to `visit`.

    Args:
        trace: the graph.
        tensors: values for its parameters and buffers; its own where missing.
    """

    def __init__(self, trace: Trace, tensors: Mapping[str, Tensor] | None = None):
        super().__init__(trace.module)
        self.extra_traceback = False  # errors of this library are complete
        self.trace = trace
        self.tensors = tensors or {}

    def walk(self) -> None:
        """Visit every node in order."""
        with torch.no_grad():
            self.run(*self.trace.inputs, enable_io_processing=False)
        self.env.clear()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and visit it."""
        if n.op == "get_attr" and n.target in self.tensors:
            result: Any = self.tensors[str(n.target)]
        else:
            result = super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self.visit(n, args, kwargs, result)
        return result

    def visit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Process a node."""
        raise NotImplementedError


def _with_plain_signature(module: fx.GraphModule) -> fx.GraphModule:
    """Make the forward of a graph take tensors and return a tensor."""
    for node in module.graph.nodes:
        if node.op == "output":
            node.args = (node.args[0][0],)
    module.graph.set_codegen(fx.graph.CodeGen())
    return fx.GraphModule(module, module.graph)


def functional(program: torch.export.ExportedProgram, decomposed: Sequence[Any] = DECOMPOSED) -> fx.GraphModule:
    """Turn a program into a graph of functional operations without regions.

    Args:
        program: the program.
        decomposed: operations to replace by the simpler ones that they consist of.
    """
    module: fx.GraphModule = program.module(check_guards=False)
    inline_regions_(module)
    if _needs_decomposition(module.graph, decomposed) or not make_functional_(module.graph):
        table = torch.export.default_decompositions()
        program = program.run_decompositions({op: table[op] for op in decomposed})
        module = program.module(check_guards=False)
    restore_recurrent_(module.graph)
    restore_attention_(module.graph)
    # Unused results, such as the mean over heads, would tie channels. Tied tensors keep all their names.
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op == "get_attr" or node.is_impure())
    module.recompile()
    return module


def restore_attention_(graph: fx.Graph) -> None:
    """Replace the kernels that torch chose for attention by whole attention."""
    for node in list(graph.nodes):
        if node.target not in _ATTENTION_KERNELS or any(user.args[1] != 0 and user.users for user in node.users):
            continue
        call = read_call(node, node.args, dict(node.kwargs), None)
        given = {key: call.nodes[key] for key in _ATTENTION if call.nodes.get(key) is not None}
        with graph.inserting_before(node):
            whole = graph.call_function(_aten.scaled_dot_product_attention.default, (), given)
        positional = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        whole.args = tuple(given.get(key, _ATTENTION[key]) for key in positional)
        whole.kwargs = {key: value for key, value in given.items() if key not in positional}
        for user in list(node.users):
            if user.args[1] == 0:
                whole.meta = dict(user.meta)
                user.replace_all_uses_with(whole)
            graph.erase_node(user)
        graph.erase_node(node)


def inline_regions_(module: fx.GraphModule) -> None:
    """Inline regions of `torch.no_grad()` and of disabled autocast, in place."""
    for node in list(module.graph.nodes):
        region, operands = _region(node)
        if region is None:
            continue
        inner: Any = module.get_submodule(str(region.target))
        inline_regions_(inner)
        for part in inner.graph.nodes:
            if part.op == "get_attr":  # a region inside that stays one
                name = f"{region.target}_{part.target}"
                module.add_submodule(name, inner.get_submodule(part.target))
                part.target = name
        placeholders = [part for part in inner.graph.nodes if part.op == "placeholder"]
        with module.graph.inserting_before(node):
            results: Any = module.graph.graph_copy(inner.graph, dict(zip(placeholders, operands, strict=True)))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not region.users:
            module.graph.erase_node(region)


def _region(node: fx.Node) -> tuple[fx.Node | None, Sequence[Any]]:
    """Return the submodule of a region that has no effect on values, and its operands."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        _, region, *operands = node.args
        return region, operands  # type: ignore[return-value]
    if node.target is torch.ops.higher_order.wrap_with_autocast and not node.args[2]:
        _, _, _, _, region, *operands = node.args
        return region, operands  # type: ignore[return-value]
    return None, ()


def _needs_decomposition(graph: fx.Graph, decomposed: Sequence[Any]) -> bool:
    return any(
        node.target in decomposed or isinstance(node.target, torch._ops.HigherOrderOperator)
        for node in graph.nodes
        if node.op == "call_function"
    )


def make_functional_(graph: fx.Graph) -> bool:
    """Replace in-place pointwise operations; return whether none is left.

    This avoids decomposing the program, which takes twice as long as tracing it.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        source, packet = node.args[0], getattr(torch.ops.aten, target._schema.name.split("::")[-1].rstrip("_"), None)
        earlier = [user for user in source.users if order[user] < order[node]]
        calm = all(
            torch.Tag.pointwise in getattr(user.target, "tags", ()) or op_name(user) in _FRESH for user in earlier
        )
        elsewhere = getattr(packet, target._overloadname, None)  # the same operation out of place
        is_pointwise = torch.Tag.pointwise in getattr(elsewhere, "tags", ()) and _is_of_one_precision(node)
        is_fresh = op_name(source) in _FRESH or source.op == "placeholder"  # the graph no longer writes to its inputs
        if not is_pointwise or not is_fresh or not calm:
            return False
        node.target = elsewhere
        source.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: order[user] > order[node])
    graph.lint()
    return True


def _is_of_one_precision(node: fx.Node) -> bool:
    """Return whether the arguments have one dtype, so that nothing is promoted."""
    values = [other.meta.get("val") for other in node.all_input_nodes]
    return len({value.dtype for value in values if isinstance(value, Tensor)} - {torch.bool}) <= 1


def op_name(node: fx.Node) -> str:
    """Return the name of a node's operation without namespace, or an empty string."""
    return node.target._schema.name.split("::")[-1] if isinstance(node.target, torch._ops.OpOverload) else ""


def _aliases(network: nn.Module, module: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """Return all names of each tensor by the one that the graph uses."""
    own = tensors_of(network)
    used = [str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users]
    by_identity: dict[int, list[str]] = {}
    for name, tensor in own.items():
        by_identity.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_identity[id(own[name])]) if name in own else (name,) for name in used}
