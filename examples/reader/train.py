"""Train the digit reader and round it to integers; write `network.json`.

    python examples/reader/train.py [--device cuda --epochs 100]

Training goes on from the checkpoint if it was interrupted. `make reader` starts from the committed `network.json` and
does not need this script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from images import TrainingImages
from rounding import rounded
from torch import Tensor, nn

import bayeslim as bl

HERE = Path(__file__).parent
CHANNELS = (1, 12, 16, 24, 28, 11)
KERNELS = (5, 3, 3, 3, 2)
STRIDES = (2, 1, 2, 1, 1)
VALIDATION_DIGITS = 5_000
RANGE_DIGITS = 2_000
"""Training digits that set the range of the activations."""


class ReaderNetwork(nn.Sequential):
    """Five convolutions without padding; ten digits and "not a digit" as outputs.

    In training, with so few channels, one matrix product over all images is twice as fast on a CPU as a convolution.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs, kernel, stride in zip(CHANNELS, CHANNELS[1:], KERNELS, STRIDES, strict=False):
            layers += [nn.Conv2d(inputs, outputs, kernel, stride), nn.ReLU()]
        super().__init__(*layers[:-1], nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, (N, 11)."""
        if not self.training or x.is_cuda:
            return super().forward(x)
        x = x.permute(1, 2, 3, 0).contiguous()
        for layer in self:
            x = convolved(layer, x) if isinstance(layer, nn.Conv2d) else x
            x = x.relu() if isinstance(layer, nn.ReLU) else x
        return x.flatten(0, 2).T


def convolved(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve images (C, H, W, N) without padding."""
    kernel, stride = layer.kernel_size[0], layer.stride[0]
    side = (x.shape[1] - kernel) // stride + 1
    end = (side - 1) * stride + 1
    shifted = [x[:, i : i + end : stride, j : j + end : stride] for i in range(kernel) for j in range(kernel)]
    columns = torch.stack(shifted, 1).reshape(layer.weight[0].numel(), -1)
    assert layer.bias is not None
    return torch.addmm(layer.bias[:, None], layer.weight.flatten(1), columns).view(-1, side, side, x.shape[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="runs/reader", help="the folder to save training to")
    parser.add_argument("--output", type=Path, default=HERE / "network.json")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    data = bl.data.load("mnist").with_validation(VALIDATION_DIGITS)
    loader = TrainingImages(data.train_x.to(options.device), data.train_y.to(options.device))
    validate = bl.data.Loader(data.valid_x, data.valid_y, batch_size=500, device=options.device)
    torch.manual_seed(0)
    bnn = bl.bayesianize(ReaderNetwork().to(options.device), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(
        loader,
        epochs=options.epochs,
        lr=4e-3,
        lr_schedule="linear",
        validate=validate,
        checkpoint=options.checkpoint,
        seed=0,
    )
    bnn.cpu().eval()
    pixels = (255 * data.valid_x[:, 0]).round().to(torch.uint8).numpy()
    network = rounded(bnn, data.train_x[:RANGE_DIGITS], pixels, data.valid_y.numpy())
    network.save(options.output)
    print(f"{options.output} is written: {options.output.stat().st_size:,} bytes.")


if __name__ == "__main__":
    main()
