"""Reference networks: plain `nn.Module`s that remember how they were built.

A network is made by its function, `zoo.lenet5(classes=10)`, or by name, `zoo.create("lenet5", classes=10)`. Its
`zoo_config` holds the name and the arguments, so that `zoo.create(**network.zoo_config)` makes the same architecture.
Add one with the decorator `@zoo.register`.
"""

from bayeslim.app.zoo.lenet import lenet5, lenet_300_100
from bayeslim.app.zoo.lstm import lstm
from bayeslim.app.zoo.mlp import mlp
from bayeslim.app.zoo.resnet import resnet18
from bayeslim.app.zoo.transformer import transformer
from bayeslim.app.zoo.vgg import vgg
from bayeslim.io.networks import create, names
from bayeslim.io.networks import register_network as register

__all__ = ["create", "lenet5", "lenet_300_100", "lstm", "mlp", "names", "register", "resnet18", "transformer", "vgg"]
