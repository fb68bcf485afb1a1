"""LeNet-300-100 and LeNet-5, the two networks on which compression is compared.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", 1998. LeNet-5 is
the Caffe variant that the pruning literature uses (20 and 50 channels, 500 units), with a rectifier after every hidden
layer, as in Molchanov, Ashukha, Vetrov, "Variational dropout sparsifies deep neural networks", 2017. Without biases
they have 266,200 and 430,500 weights.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from bayeslim.io.networks import register_network


@register_network
def lenet_300_100(inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """Build LeNet-300-100: two hidden layers of 300 and 100 units.

    Args:
        inputs: the size of an example; any shape is flattened.
        classes: the number of outputs.
    """
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(inputs, 300),
            relu1=nn.ReLU(),
            fc2=nn.Linear(300, 100),
            relu2=nn.ReLU(),
            fc3=nn.Linear(100, classes),
        )
    )


@register_network
def lenet5(in_channels: int = 1, classes: int = 10, image_size: int = 28) -> nn.Sequential:
    """Build LeNet-5: convolutions of 20 and 50 channels, then 500 hidden units.

    Args:
        in_channels: channels of the images.
        classes: the number of outputs.
        image_size: height and width of the images, at least 16.
    """
    side = ((image_size - 4) // 2 - 4) // 2
    if side < 1:
        raise ValueError(
            f"lenet5 needs images of at least 16x16. Got image_size={image_size}. Pad them, or use an mlp."
        )
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 20, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(20, 50, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(50 * side * side, 500),
            relu3=nn.ReLU(),
            fc2=nn.Linear(500, classes),
        )
    )
