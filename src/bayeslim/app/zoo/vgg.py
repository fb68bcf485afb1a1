"""The VGG-like network for CIFAR-10 on which sparse Bayesian methods are compared.

Thirteen 3x3 convolutions with batch normalisation in five stages, and one hidden layer of 512 units: the network of
Zagoruyko (2015) after Simonyan & Zisserman, "Very deep convolutional networks", 2014, used by Molchanov et al.,
"Variational dropout sparsifies deep neural networks", 2017, and its successors. Dropout is left out: the posterior's
noise takes its place.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from bayeslim.io.networks import register_network

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@register_network
def vgg(in_channels: int = 3, classes: int = 10, width: float = 1.0, image_size: int = 32) -> nn.Sequential:
    """Build a VGG-like network.

    Args:
        in_channels: channels of the images.
        classes: the number of outputs.
        width: multiplies the number of channels and hidden units, at least one of each being kept.
        image_size: height and width of the images, at least 32.
    """
    if width <= 0:
        raise ValueError(f"vgg needs a positive width factor. Got {width}.")
    side = image_size // 2 ** len(STAGES)
    if side < 1:
        raise ValueError(f"vgg halves the image five times and needs at least 32x32. Got image_size={image_size}.")

    def scaled(channels: int) -> int:
        return max(1, round(channels * width))

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    previous = in_channels
    for s, stage in enumerate(STAGES, 1):
        for i, channels in enumerate(map(scaled, stage), 1):
            # batch normalisation has the shift, so the convolution needs no bias
            layers[f"conv{s}_{i}"] = nn.Conv2d(previous, channels, 3, padding=1, bias=False)
            layers[f"bn{s}_{i}"] = nn.BatchNorm2d(channels)
            layers[f"relu{s}_{i}"] = nn.ReLU()
            previous = channels
        layers[f"pool{s}"] = nn.MaxPool2d(2)
    hidden = scaled(512)
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(previous * side * side, hidden, bias=False)
    layers["bn"] = nn.BatchNorm1d(hidden)
    layers["relu"] = nn.ReLU()
    layers["fc2"] = nn.Linear(hidden, classes)
    return nn.Sequential(layers)
