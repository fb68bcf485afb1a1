"""Values that are marked as constant are constant, checked on other inputs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from networks import CASES, prepared

from bayeslim.compact.liveness import Liveness
from bayeslim.compact.trace import tensors_of


class Values(Liveness):
    """Keeps every value of the walk."""

    def visit(self, node, args, kwargs, result):
        super().visit(node, args, kwargs, result)
        self.values = getattr(self, "values", {})
        self.values[node] = result


@pytest.mark.parametrize("name", list(CASES)[1::2])
def test_what_changes_with_the_input_is_marked(name):
    (model, _), found = prepared(name)
    masked = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in masked.parameters():
            parameter *= torch.rand(parameter.shape, generator=generator) < 0.04
    channels = found.structure.channels
    trace = channels.trace
    walks = []
    for shift in (0.0, 1.3):
        inputs = tuple((x * 2 + shift if x.is_floating_point() else (x + int(shift)) % 5) for x in trace.inputs)
        channels.trace = dataclasses.replace(trace, inputs=inputs)
        walks.append(Values(channels, tensors_of(masked)))
    channels.trace = trace
    constant = 0
    for node, first in walks[0].values.items():
        if node.op == "call_function" and isinstance(first, torch.Tensor):
            moved = first != walks[1].values[node]
            assert not bool((moved & ~walks[0].varies[node]).any()), node
            constant += int((~walks[0].varies[node]).sum())
    assert constant > 0
