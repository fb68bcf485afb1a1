"""Recurrent layers are exported as one operation each, with any number of time steps."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.export.onnx import Session


class Encoder(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = cell(4, 6, 2, batch_first=True, bidirectional=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_an_onnx_file_takes_sequences_of_other_lengths(cell, tmp_path):
    torch.manual_seed(0)
    network = Encoder(cell).eval()
    bl.export(network, tmp_path / "net.onnx", example=torch.randn(2, 5, 4))
    session, longer = Session((tmp_path / "net.onnx").read_bytes()), torch.randn(3, 9, 4)
    torch.testing.assert_close(session(longer)[0], network(longer), atol=1e-5, rtol=1e-4)


def test_a_plain_recurrent_layer_is_unrolled_in_onnx(tmp_path):
    torch.manual_seed(0)
    exported = bl.export(Encoder(nn.RNN).eval(), tmp_path / "net.onnx", example=torch.randn(2, 3, 4))
    assert exported.difference < 1e-5


def test_a_program_needs_torch_alone(tmp_path):
    torch.manual_seed(0)
    bl.export(Encoder(nn.LSTM).eval(), tmp_path / "net.pt2", example=torch.randn(2, 5, 4))
    code = (
        "import sys, torch; program = torch.export.load(sys.argv[1]).module(); "
        "print(tuple(program(torch.zeros(3, 9, 4)).shape), 'bayeslim' in sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "net.pt2")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "(3, 9, 3) False"


def test_a_stored_graph_takes_sequences_of_other_lengths(tmp_path):
    torch.manual_seed(0)
    network, longer = Encoder(nn.GRU).eval(), torch.randn(1, 9, 4)
    bl.save(network, tmp_path, example=torch.randn(2, 5, 4))
    torch.testing.assert_close(bl.load(tmp_path)(longer), network(longer))
