"""The architecture in a file, in a few bytes.

For a network of `bayeslim.zoo`, the file holds its name and the arguments that are not defaults; if it was compacted,
also its new sizes. For any other network it holds only a checksum of the names, shapes and types of the tensors, and
the caller passes the network to `decode`. The checksum always guards against weights of another network.
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
_MAX_TEXT_BYTES = 1 << 12
_MAX_ARGUMENT, _DEPTH_ARGUMENTS, _MAX_DEPTH = 1 << 18, ("depth", "layers"), 1 << 9
"""The largest arguments in a file; a network with larger ones is passed by the caller."""

_ALWAYS_ALLOWED_ENTRIES = 1 << 26
_MAX_ENTRIES_PER_BYTE = 1 << 16


def tensors_of(network: nn.Module) -> Params:
    """Collect the tensors of a network's state by name, tied ones once.

    Raises:
        BayeslimError: if an entry of its state is not a tensor.
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
    """Code the architecture of a network."""
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
        defaults = _defaults(config["name"])
        changed = {
            key: value for key, value in config.items() if key != "name" and defaults.get(key, _LETTERS) != value
        }
        _code_text(coder, json.dumps(changed, separators=(",", ":")) if changed else "")
        coder.uniform(list(FORMATS).index(next(iter(types))), len(FORMATS))
    if kind == CUT:
        _code_shapes(coder, whole, own)
    coder.uniform(_checksum(own), 1 << 16)


def read_architecture(coder: Coder, model: nn.Module | None, file_size: int) -> nn.Module:
    """Decode the architecture of a file into a network with arbitrary values.

    Args:
        coder: a reader.
        model: the caller's network, which is copied.
        file_size: in bytes; it bounds the memory that a damaged file can make us allocate.

    Raises:
        CorruptFile: if the file does not fit the model, or names an unknown network.
        BayeslimError: if a model is needed and not given.
    """
    kind = coder.uniform(0, 3)
    if kind == GIVEN:
        if model is None:
            raise BayeslimError(
                "The file holds the weights of a network that is not in bayeslim.zoo, without its code. Pass the "
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
        config = {"name": name, **_defaults(name), **(json.loads(text) if text else {})}
        if _exceeds(config):
            raise CorruptFile("The file names a network far larger than a file of its size can hold.")
        dtype = list(FORMATS)[coder.uniform(0, len(FORMATS))]
        network = _outline(config, dtype)
    except CorruptFile:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, RecursionError) as error:
        raise CorruptFile(f"The file names a network that bayeslim.zoo does not have: {error}.") from error
    if sum(tensor.numel() for tensor in tensors_of(network).values()) > max(
        _ALWAYS_ALLOWED_ENTRIES, _MAX_ENTRIES_PER_BYTE * file_size
    ):
        raise CorruptFile("The file names a network far larger than a file of its size can hold.")
    with kept_random_state():
        network = create(**config).to(dtype)
    if kind == CUT:
        _cut_(network, _code_shapes(coder, tensors_of(network), None))
    return network


def _exceeds(config: Mapping[str, Any]) -> bool:
    """Check whether an argument exceeds the limits on width and depth."""
    most = {key: _MAX_DEPTH if key in _DEPTH_ARGUMENTS else _MAX_ARGUMENT for key in config}
    return any(isinstance(value, int) and abs(value) > most[key] for key, value in config.items())


def _outline(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Create a network of the zoo on the meta device."""
    with torch.device("meta"), kept_random_state():
        return create(**config).to(dtype)


def _defaults(name: str) -> dict[str, Any]:
    """Return the default arguments of a network of the zoo."""
    parameters = inspect.signature(registered("network", name)).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty}


def _kind(network: nn.Module, outline: nn.Module) -> int:
    """Classify a network: as in the zoo, cut smaller, or neither."""
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
    """Shrink a network's tensors to smaller shapes, in place."""
    state = network.state_dict(keep_vars=True)
    names = {name: tuple(other for other, tensor in state.items() if tensor is state[name]) for name in shapes}
    smaller = {name: state[name].new_zeros(shape) for name, shape in shapes.items() if state[name].shape != shape}
    put_tensors(network, {name: tensor.detach() for name, tensor in smaller.items()}, names)
    resize_modules(network, {})


def _sizes(network: nn.Module) -> dict[str, dict[str, Any]]:
    """Collect the integer attributes of a network's modules."""
    return {
        path: {name: value for name, value in vars(module).items() if type(value) is int}
        for path, module in network.named_modules()
    }


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
    return zlib.crc32(text.encode()) & 0xFFFF


def _code_name(coder: Coder, name: str) -> str:
    found = ""
    for letter in name.ljust(_MAX_TEXT_BYTES, "\0"):
        letter = _LETTERS[coder.uniform(_LETTERS.index(letter), len(_LETTERS))]
        if letter == "\0":
            break
        found += letter
    return found


def _code_text(coder: Coder, text: str) -> str:
    data = text.encode()
    length = Naturals(_MAX_TEXT_BYTES).code(coder, len(data))
    found = bytes(coder.uniform(data[place] if data else 0, 256) for place in range(length))
    return found.decode()


def _code_shapes(
    coder: Coder, whole: Mapping[str, Tensor], given: Mapping[str, Tensor] | None
) -> dict[str, tuple[int, ...]]:
    """Code the shapes of a cut network, most of which follow from the units."""
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
