"""Data sets by name, in memory, and a loader that keeps them on the device.

data = bl.data.load("mnist").with_validation(10_000)
loader = bl.data.Loader(data.train_x, data.train_y, batch_size=128, device="cuda")
"""

from bayeslim.app.data.load import load, names
from bayeslim.train.dataset import Dataset, Scale
from bayeslim.train.loaders import Loader

__all__ = ["Dataset", "Loader", "Scale", "load", "names"]
