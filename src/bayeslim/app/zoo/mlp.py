"""The multilayer perceptron of the Bayes by Backprop experiments, and of most others.

C. Blundell, J. Cornebise, K. Kavukcuoglu, D. Wierstra, "Weight uncertainty in neural networks", 2015: MNIST with two
hidden layers of 400, 800 or 1200 rectified units.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from bayeslim.io.networks import register_network


@register_network
def mlp(hidden: int = 400, inputs: int = 784, classes: int = 10, depth: int = 2, dropout: float = 0.0) -> nn.Sequential:
    """Build a multilayer perceptron with equal hidden layers and rectifiers.

    >>> mlp(50, inputs=13, classes=1, depth=1)
    Sequential(
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (fc1): Linear(in_features=13, out_features=50, bias=True)
      (relu1): ReLU()
      (fc2): Linear(in_features=50, out_features=1, bias=True)
    )

    Args:
        hidden: units of each hidden layer.
        inputs: the size of an example; any shape is flattened.
        classes: the number of outputs; 1 for the regression of one target.
        depth: the number of hidden layers.
        dropout: the probability of dropping a hidden unit; at 0 there are no dropout layers.
    """
    if depth < 0:
        raise ValueError(f"mlp needs a depth of 0 or more hidden layers. Got {depth}.")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = inputs
    for i in range(1, depth + 1):
        layers[f"fc{i}"] = nn.Linear(width, hidden)
        layers[f"relu{i}"] = nn.ReLU()
        if dropout:
            layers[f"dropout{i}"] = nn.Dropout(dropout)
        width = hidden
    layers[f"fc{depth + 1}"] = nn.Linear(width, classes)
    return nn.Sequential(layers)
