"""Compacted networks, of both kinds, leave PyTorch: onnxruntime gives the same answers."""

from __future__ import annotations

import copy
import warnings

import onnxruntime
import pytest
import torch
from networks import prepared

from bayeslim.compact import compaction


@pytest.mark.parametrize("name", ["lenet_5", "resnet_18"])
def test_onnxruntime_agrees(name, tmp_path):
    (model, example), graph = prepared(name)
    result = compaction(model, graph.masks(range(0, len(graph.units), 2)), example, units=graph)
    network, x = copy.deepcopy(result.network).float(), example.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (x,), tmp_path / "slim.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "slim.onnx")
    (actual,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(actual), network(x), rtol=1e-5, atol=1e-5)
