"""ResNet-18 with the stem for small images: a 3x3 convolution in place of the 7x7 with pooling.

K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", 2015.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.io.networks import register_network


class ResidualBlock(nn.Module):
    """y = relu(x + f(x)), with a 1x1 convolution on x where the shape changes; f is two 3x3 convolutions."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and in_channels == channels
            else nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) to (B, channels, H / stride, W / stride)."""
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.bn2(self.conv2(inner)))


class ResNet(nn.Module):
    """A stem, four stages of two residual blocks, the mean over positions, and a linear head."""

    def __init__(self, in_channels: int, classes: int, width: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.stage1 = _stage(width, width, 1)
        self.stage2 = _stage(width, 2 * width, 2)
        self.stage3 = _stage(2 * width, 4 * width, 2)
        self.stage4 = _stage(4 * width, 8 * width, 2)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_channels, H, W) to logits (B, classes)."""
        x = F.relu(self.bn(self.conv(x)))
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _stage(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(ResidualBlock(in_channels, channels, stride), ResidualBlock(channels, channels, 1))


@register_network
def resnet18(in_channels: int = 3, classes: int = 10, width: int = 64) -> ResNet:
    """Build a ResNet-18 for images of any size.

    Args:
        in_channels: channels of the images.
        classes: the number of outputs.
        width: channels of the first stage; each further one has twice as many.
    """
    return ResNet(in_channels, classes, width)
