"""Which network a file is of, in a few bytes.

A network of `bayeslim.zoo` is its name and the arguments that are not the usual ones; if it was compacted, also the
sizes that shrank. Of any other network only a checksum of its tensors' names, shapes and types is stored, and the
caller brings the network. Either way that checksum says whether weights and network belong together.
"""

from __future__ import annotations

import copy
import inspect
import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.coding.adaptive import Bits, Naturals
from bayeslim.coding.coders import Coder
from bayeslim.coding.formats import FORMATS
from bayeslim.compact.rebuild import put_tensors, resize_modules
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io.networks import config_of, create, names
from bayeslim.io.registry import registered
from bayeslim.noise import kept_random_state
from bayeslim.types import Params

GIVEN, ZOO, CUT = range(3)
_LETTERS = "\0abcdefghijklmnopqrstuvwxyz0123456789_"
_LONGEST = 1 << 12
_LARGEST_ARGUMENT, _DEPTHS, _DEEPEST = 1 << 18, ("depth", "layers"), 1 << 9
"""Numbers in a file that say how large and deep a network is to be; with larger ones, the caller brings the network."""

_SMALL = 1 << 26
_EXPANSION = 1 << 16


def tensors_of(network: nn.Module) -> Params:
    """The tensors of a network's state by name, tied ones once.

    Raises:
        BayeslimError: if it has state that is no tensor.
    """
    state = network.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise BayeslimError(
                f'"{name}" of {type(network).__name__} is a {type(value).__name__}, not a tensor, and cannot be coded.'
            )
    once: dict[int, str] = {}
    for name, value in state.items():
        once.setdefault(id(value), name)
    return {name: state[name] for name in once.values()}


_OF_COMPACTED = (
    " A file that was coded from a compacted network needs that one as model=..., with its own sizes: keep it with "
    "bl.save(slim, folder), and pass bl.load(folder, model=YourModel()) here."
)


def write_architecture(coder: Coder, network: nn.Module) -> None:
    """Say which network a file is of."""
    own = tensors_of(network)
    config = config_of(network)
    types = {tensor.dtype for tensor in own.values() if tensor.is_floating_point()}
    kind, whole = GIVEN, Params()
    if config is not None and len(types) == 1 and set(config["name"]) <= set(_LETTERS[1:]) and not _exceeds(config):
        outline = _outline(config, next(iter(types)))
        whole = tensors_of(outline)
        kind = _kind(network, outline)
    coder.uniform(kind, 3)
    if kind != GIVEN:
        assert config is not None
        _code_name(coder, config["name"])
        usual = _usual(config["name"])
        unusual = {key: value for key, value in config.items() if key != "name" and usual.get(key, _LETTERS) != value}
        _code_text(coder, json.dumps(unusual, separators=(",", ":")) if unusual else "")
        coder.uniform(list(FORMATS).index(next(iter(types))), len(FORMATS))
    if kind == CUT:
        _code_shapes(coder, whole, own)
    coder.uniform(_checksum(own), 1 << 16)


def read_architecture(coder: Coder, model: nn.Module | None, file_size: int) -> nn.Module:
    """The network that a file is of, with whatever values.

    Args:
        coder: which reads.
        model: the caller's network, which is copied.
        file_size: how many bytes the file has, since a small file must not make us allocate much.

    Raises:
        CorruptFile: if the file does not fit the model, or names a network that there is not.
        BayeslimError: if a model is needed and not given.
    """
    kind = coder.uniform(0, 3)
    if kind == GIVEN:
        if model is None:
            raise BayeslimError(
                "The file holds the weights of a network that bayeslim.zoo does not have, not its code. Pass the "
                "architecture: decode(path, model=YourModel())."
            )
        network = copy.deepcopy(model)
    else:
        network = _read_zoo(coder, kind, file_size)
        if model is not None:
            network = copy.deepcopy(model)
    if coder.uniform(0, 1 << 16) != _checksum(tensors_of(network)):
        raise CorruptFile(
            f"The file does not fit {type(network).__name__}: its tensors have other names, shapes or types."
            f"{_OF_COMPACTED if kind == GIVEN or model else ''}"
        )
    return network


def _read_zoo(coder: Coder, kind: int, file_size: int) -> nn.Module:
    name = _code_name(coder, "")
    if name not in names():
        raise CorruptFile(f'The file names a network that bayeslim.zoo does not have: "{name}".')
    try:
        text = _code_text(coder, "")
        config = {"name": name, **_usual(name), **(json.loads(text) if text else {})}
        if _exceeds(config):
            raise CorruptFile("The file names a network far larger than a file of its size can hold.")
        dtype = list(FORMATS)[coder.uniform(0, len(FORMATS))]
        network = _outline(config, dtype)
    except CorruptFile:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, RecursionError) as error:
        raise CorruptFile(f"The file names a network that bayeslim.zoo does not have: {error}.") from error
    if sum(tensor.numel() for tensor in tensors_of(network).values()) > max(_SMALL, _EXPANSION * file_size):
        raise CorruptFile("The file names a network far larger than a file of its size can hold.")
    with kept_random_state():
        network = create(**config).to(dtype)
    if kind == CUT:
        _cut_(network, _code_shapes(coder, tensors_of(network), None))
    return network


def _exceeds(config: Mapping[str, Any]) -> bool:
    """Whether a network would be too wide, or too deep to be made in a moment."""
    most = {key: _DEEPEST if key in _DEPTHS else _LARGEST_ARGUMENT for key in config}
    return any(isinstance(value, int) and abs(value) > most[key] for key, value in config.items())


def _outline(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """A network of the zoo without memory."""
    with torch.device("meta"), kept_random_state():
        return create(**config).to(dtype)


def _usual(name: str) -> dict[str, Any]:
    """The usual arguments of a network of the zoo."""
    parameters = inspect.signature(registered("network", name)).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty}


def _kind(network: nn.Module, outline: nn.Module) -> int:
    """Whether a network is its entry in the zoo, or that cut smaller, or neither any more."""
    own, whole = tensors_of(network), tensors_of(outline)
    if _checksum(own) == _checksum(whole):
        return ZOO
    if own.keys() != whole.keys() or any(
        tensor.ndim != whole[name].ndim or any(a > b for a, b in zip(tensor.shape, whole[name].shape, strict=True))
        for name, tensor in own.items()
    ):
        return GIVEN
    _cut_(outline, {name: tuple(tensor.shape) for name, tensor in own.items()})
    return CUT if _checksum(tensors_of(outline)) == _checksum(own) and _sizes(outline) == _sizes(network) else GIVEN


def _cut_(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Cut a network's tensors to smaller shapes, in place."""
    state = network.state_dict(keep_vars=True)
    names = {name: tuple(other for other, tensor in state.items() if tensor is state[name]) for name in shapes}
    smaller = {name: state[name].new_zeros(shape) for name, shape in shapes.items() if state[name].shape != shape}
    put_tensors(network, {name: tensor.detach() for name, tensor in smaller.items()}, names)
    resize_modules(network, {})


def _sizes(network: nn.Module) -> dict[str, dict[str, Any]]:
    """The integers that a network's modules remember."""
    return {
        path: {name: value for name, value in vars(module).items() if type(value) is int}
        for path, module in network.named_modules()
    }


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
    return zlib.crc32(text.encode()) & 0xFFFF


def _code_name(coder: Coder, name: str) -> str:
    found = ""
    for letter in name.ljust(_LONGEST, "\0"):
        letter = _LETTERS[coder.uniform(_LETTERS.index(letter), len(_LETTERS))]
        if letter == "\0":
            break
        found += letter
    return found


def _code_text(coder: Coder, text: str) -> str:
    data = text.encode()
    length = Naturals(_LONGEST).code(coder, len(data))
    found = bytes(coder.uniform(data[place] if data else 0, 256) for place in range(length))
    return found.decode()


def _code_shapes(
    coder: Coder, whole: Mapping[str, Tensor], given: Mapping[str, Tensor] | None
) -> dict[str, tuple[int, ...]]:
    """The shapes of a network that was cut, most of which follow from the number of units in each weight."""
    guesses, found = Bits(), dict[str, tuple[int, ...]]()
    old_units = units = 0
    for name, tensor in whole.items():
        shape: list[int] = []
        for place, old in enumerate(tensor.shape):
            follows = old_units and old % old_units == 0 and (place == 1 or tensor.ndim == 1)
            guess = old // old_units * units if follows else old
            size = given[name].shape[place] if given is not None else 0
            if not guesses.code(coder, int(size == guess), (place == 0, tensor.ndim > 1)):
                guess = coder.uniform(size, old + 1)
            shape.append(guess)
        if tensor.ndim > 1:
            old_units, units = tensor.shape[0], shape[0]
        found[name] = tuple(shape)
    return found
