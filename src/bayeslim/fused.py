"""Layers that follow each other, called as one: the same values in fewer passes over memory.

For predictions, where nothing is differentiated. In every `nn.Sequential` of a network,
- a batch norm in evaluation mode is part of the convolution or product before it: γ (W x + b − m) / √(v + ε) + β is
  W' x + b' with W' = W s, b' = β + (b − m) s and s = γ / √(v + ε);
- a rectifier is part of what is before it on a GPU, and writes over what it reads elsewhere;
- pooling comes before a rectifier, as max max(x, 0) = max(max x, 0), and leaves fewer values to it.

On ARM CPUs they multiply, and convolve few images, by BLAS. Wherever they stand, products, convolutions, norms,
recurrent layers and some functions go without what modules do around them, and on a CPU pooling takes maxima of shifted
views, a tenth of the time of torch's own, which also finds out where they were. Layers with hooks, and all that is not
known here, are called as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from operator import is_, methodcaller
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.nn.modules.batchnorm import _NormBase

from bayeslim import recurrent
from bayeslim.blas import IS_ARM, by_blas, convolution_of, is_quicker_by_blas
from bayeslim.graphs import Call
from bayeslim.stochastic import plain_type
from bayeslim.types import device_of, modules_of

Step = Callable[[Any], Any]

MANY = {"cpu": 2**18, "cuda": 2**22}
"""Of how many values scaling the weights takes less time than scaling what they give."""
POOLED = 2**14
"""Of how many values maxima of views take less time than torch's own."""
SOME = {"cpu": 2**12, "cuda": 2**20}
"""Of how many values finding out what to do takes less time than it saves: on a GPU, where there are norms."""

_NORMS = {nn.Conv2d: nn.BatchNorm2d, nn.Linear: nn.BatchNorm1d}
_DIMENSIONS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)
}  # fmt: skip
_ELEMENTWISE: dict[type[nn.Module], Step] = {
    nn.Tanh: torch.tanh, nn.Sigmoid: torch.sigmoid, nn.ReLU: torch.relu, nn.SiLU: F.silu
}  # fmt: skip
SAME = frozenset({nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d})
"""What does nothing in evaluation mode."""


class AtLeast(nn.Module):
    """Writes least values over those that are less: a rectifier of products whose bias is added later."""

    def __init__(self, least: Tensor):
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        """The values."""
        return x.clamp_min_(self.least)


@contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """Inside, layers of `model` that follow each other are called as one, where it is known to be the same.

    Nothing is changed under autocast, a compiler, or hooks of all modules.
    """
    taken: list[nn.Module] = []
    try:
        for module, forward in quicker(model):
            taken.append(module)
            vars(module)["forward"] = forward
        yield
    finally:
        for module in taken:
            del vars(module)["forward"]


def quicker(model: nn.Module, lasting: bool = False) -> Iterator[tuple[nn.Module, Step]]:
    """Modules that can be called in another way, the outermost of those within each other, with that way.

    Args:
        model: the network.
        lasting: whether its layers keep the tensors that they have now.
    """
    device = device_of(model).type
    modules = modules_of(model)
    if not is_quiet(device) or any(map(is_compiled, modules)):
        return
    within: set[nn.Module] = set()
    for module in sorted(modules, key=_is_row, reverse=True):
        if module in within or not is_plain(module):
            continue
        if _is_row(module):
            layers = list(_layers(module, within))
            steps = steps_of(layers, device, lasting)
            if len(steps) < len(layers) or not all(map(is_, steps, layers)):
                has_norms = any(isinstance(layer, _NormBase) for layer in layers)
                alone = [(_step_of(layer, device, lasting) if is_plain(layer) else None) or layer for layer in layers]
                yield module, partial(_run, steps, alone, SOME[device] if has_norms or device == "cpu" else 0)
        elif (step := _step_of(module, device, lasting)) is not None:
            yield module, step


def _step_of(layer: Any, device: str, lasting: bool) -> Step | None:
    """What to do in place of calling one layer; None for what is called as it is."""
    kind = plain_type(layer)
    if kind is Call:
        return cast(Step, layer.bound())
    if kind is nn.Flatten:
        return methodcaller("flatten", layer.start_dim, layer.end_dim)
    if kind is AtLeast:
        return partial(torch.clamp_min_, min=layer.least)
    if kind in _ELEMENTWISE:
        return None if getattr(layer, "inplace", False) else _ELEMENTWISE[kind]
    if kind is nn.GELU:
        return partial(F.gelu, approximate=layer.approximate)
    if kind is nn.LayerNorm:
        return partial(_layer_normed, layer) if {"weight", "bias"} <= layer._parameters.keys() else None
    if kind in _DIMENSIONS:
        return partial(_normed, layer) if is_fixed(layer) else None
    if kind in _PRODUCTS:
        known = {"weight", "bias"} <= layer._parameters.keys() and getattr(layer, "padding_mode", "zeros") == "zeros"
        if known and lasting and kind is nn.Linear and not IS_ARM:
            return partial(F.linear, weight=layer.weight, bias=layer.bias)
        return partial(_PRODUCTS[kind], layer) if known else None
    if kind is nn.Embedding:
        return partial(_embedded, layer) if "weight" in layer._parameters and layer.max_norm is None else None
    if isinstance(layer, nn.RNNBase):
        return partial(recurrent.called, layer) if recurrent.is_known(layer) else None
    return partial(_pooled, layer) if device == "cpu" and _is_simple_pool(layer) else None


def is_quiet(device: str) -> bool:
    """Whether nothing has a say in how modules of all kinds are called."""
    return (
        device in MANY
        and not torch.is_autocast_enabled(device)
        and not torch.compiler.is_compiling()
        and not every_module._global_forward_hooks
        and not every_module._global_forward_pre_hooks
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether calling a module is calling something that was compiled."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def is_plain(module: nn.Module) -> bool:
    """Whether a module is called as its class says, and nobody looks on."""
    own = vars(module)
    return not (own.get("_forward_hooks") or own.get("_forward_pre_hooks") or "forward" in own)


def _is_row(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def _layers(row: nn.Module, within: set[nn.Module]) -> Iterator[nn.Module]:
    """The layers of a row, and of rows in it, one after the other; one may stand there several times."""
    for layer in row._modules.values():
        if layer is None:
            continue
        within.add(layer)
        if _is_row(layer) and is_plain(layer):
            yield from _layers(layer, within)
        else:
            yield layer


def _run(steps: Sequence[Step], alone: Sequence[Step], some: int, x: Any) -> Any:
    for step in steps if isinstance(x, Tensor) and x.numel() > some else alone:
        x = step(x)
    return x


def steps_of(layers: Sequence[nn.Module], device: str, lasting: bool = False) -> list[Step]:
    """What to do in place of calling layers in evaluation mode, one after the other."""
    kinds: list[Any] = [plain_type(layer) if is_plain(layer) else None for layer in layers]
    steps: list[Step] = []
    fresh = False  # whether the values are of this row's own making, and of no use to others
    i = 0
    while i < len(layers):
        layer, kind = layers[i], kinds[i]
        i += 1
        if kind in SAME and not layer.training:
            continue
        if kind in _NORMS:
            norm: Any = None
            if i < len(layers) and kinds[i] is _NORMS[kind] and is_fixed(layers[i]):
                norm = layers[i]
                i += 1
            rectified = device == "cuda" and i < len(layers) and kinds[i] is nn.ReLU
            i += rectified
            changes = norm or rectified or IS_ARM
            own = None if changes else _step_of(layer, device, lasting)
            steps.append(_product(layer, norm, rectified, device) if changes else own or layer)
            fresh = True
        elif kind is nn.ReLU and (fresh or not cast(nn.ReLU, layer).inplace):  # else others read what it writes to
            if device == "cpu" and i < len(layers) and kinds[i] is nn.MaxPool2d and _is_simple_pool(layers[i]):
                steps.append(partial(_pooled, layers[i]))
                i, fresh = i + 1, True
            steps.append(torch.relu_ if fresh else torch.relu)
            fresh = True
        else:
            steps.append((None if kind is None else _step_of(layer, device, lasting)) or layer)
            fresh = fresh if kind is nn.Flatten else kind is not Call and steps[-1] is not layer
    return steps


def _product(layer: Any, norm: Any, rectified: bool, device: str) -> Step:
    """A linear layer or convolution with the batch norm and the rectifier after it."""
    apply = _linear if plain_type(layer) is nn.Linear else _convolution

    def step(x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        if norm is None:
            return apply(layer, x, weight, bias, rectified)
        if (
            _numbers_given(layer, x, weight) > max(MANY[device], 4 * weight.numel())
            and x.ndim == weight.ndim  # else the features of a linear layer are not those of the norm
            and is_full(x, weight, norm.running_var)
        ):
            return apply(layer, x, *_scaled(weight, bias, norm), rectified)
        x = apply(layer, x, weight, bias, False)
        x = _normed(norm, x)
        return x.relu_() if rectified else x

    return step


def _normed(norm: Any, x: Tensor) -> Tensor:
    """A batch norm in evaluation mode; a call of the module takes as long again."""
    if x.ndim not in _DIMENSIONS[type(norm)]:
        return type(norm).forward(norm, x)  # type: ignore[no-any-return]  # which says what is wrong
    own, kept = norm._parameters, norm._buffers
    return torch.batch_norm(
        x, own["weight"], own["bias"], kept["running_mean"], kept["running_var"], False, 0.0, norm.eps,
        torch.backends.cudnn.enabled,
    )  # fmt: skip


def _layer_normed(norm: Any, x: Tensor) -> Tensor:
    """A layer norm, without what a module does before it."""
    own = norm._parameters
    return torch.layer_norm(
        x, norm.normalized_shape, own["weight"], own["bias"], norm.eps, torch.backends.cudnn.enabled
    )


def _numbers_given(layer: Any, x: Tensor, weight: Tensor) -> int:
    """About how many values a layer gives."""
    steps = layer.stride[0] * layer.stride[1] if weight.ndim == 4 else 1
    return x.numel() // x.shape[1 if weight.ndim == 4 else -1] * weight.shape[0] // steps


def _linear(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, rectified: bool) -> Tensor:
    if rectified and x.is_cuda and x.ndim == 2 and bias is not None:
        return torch._addmm_activation(bias, x, weight.mT)
    with by_blas() if is_quicker_by_blas(x, weight) and is_full(x, weight) else nullcontext():
        x = F.linear(x, weight, bias)
    return x.relu_() if rectified else x


def _convolution(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rectified: bool) -> Tensor:
    if rectified and _by_cudnn(layer, x, weight):
        return torch.cudnn_convolution_relu(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    with convolution_of(x, weight, layer.groups):
        x = layer._conv_forward(x, weight, bias)
    return x.relu_() if rectified else x


def _convolved(layer: Any, x: Tensor) -> Tensor:
    """A convolution, without what a module does before it."""
    own = layer._parameters
    return torch.conv2d(x, own["weight"], own["bias"], layer.stride, layer.padding, layer.dilation, layer.groups)


def _embedded(layer: Any, x: Tensor) -> Tensor:
    """Rows of a table, without what a module does before it."""
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    return torch.embedding(layer._parameters["weight"], x, padding)


def _multiplied(layer: Any, x: Tensor) -> Tensor:
    """A linear layer, without what a module does before it."""
    own = layer._parameters
    weight = own["weight"]
    if is_quicker_by_blas(x, weight) and is_full(x, weight):
        with by_blas():
            return F.linear(x, weight, own["bias"])
    return F.linear(x, weight, own["bias"])


def _convolved_along(layer: Any, x: Tensor) -> Tensor:
    """A convolution along one dimension; with channels along memory, as one of images of one row."""
    own = layer._parameters
    if x.ndim != 3 or x.shape[0] == 1 or x.is_contiguous() or isinstance(layer.padding, str):
        return torch.conv1d(x, own["weight"], own["bias"], layer.stride, layer.padding, layer.dilation, layer.groups)
    stride, padding, dilation = (1, *layer.stride), (0, *layer.padding), (1, *layer.dilation)
    weight = own["weight"].unsqueeze(2)
    return torch.conv2d(x.unsqueeze(2), weight, own["bias"], stride, padding, dilation, layer.groups).squeeze(2)


_PRODUCTS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Conv1d: _convolved_along, nn.Conv2d: _convolved, nn.Linear: _multiplied
}  # fmt: skip


def is_fixed(norm: Any) -> bool:
    """Whether a batch norm is the same function for every batch, of the tensors that it was made with."""
    known = {"weight", "bias"} <= norm._parameters.keys() and {"running_mean", "running_var"} <= norm._buffers.keys()
    return known and not norm.training and norm.running_mean is not None and norm.running_var is not None


def is_full(*tensors: Tensor) -> bool:
    """Whether all are of one precision, and not of half of it, in which scaled weights would be rounded once more."""
    dtype = tensors[0].dtype
    return dtype in (torch.float32, torch.float64) and all(tensor.dtype == dtype for tensor in tensors)


def _scaled(weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    scale = (norm.running_var + norm.eps).rsqrt_()
    if norm.weight is not None:
        scale *= norm.weight
    shift = -norm.running_mean if bias is None else bias - norm.running_mean
    shift *= scale
    if norm.bias is not None:
        shift += norm.bias
    return weight * scale.view(-1, *[1] * (weight.ndim - 1)), shift


def _by_cudnn(layer: Any, x: Tensor, weight: Tensor) -> bool:
    """Whether cuDNN can rectify what it convolves, in less time: of odd numbers of channels it takes longer."""
    return (
        x.is_cuda
        and layer.out_channels % 4 == 0
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and x.ndim == 4
        and x.dtype == weight.dtype == torch.float32
        and torch.backends.cudnn.is_acceptable(x)
        and torch.version.hip is None
    )


def _is_simple_pool(layer: Any) -> bool:
    """Whether a layer is `nn.MaxPool2d` of windows that stay within the image."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    return _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1) and _pair(layer.kernel_size) != (1, 1)


def _pooled(layer: Any, x: Tensor) -> Tensor:
    """Maxima over windows: of rows, which lie along memory, then of columns."""
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
    height, width = x.shape[-2:]
    if height < kernel[0] or width < kernel[1] or x.numel() < POOLED or not x.is_contiguous():
        return F.max_pool2d(x, kernel, stride)  # which says what is wrong, and is quick of channels last
    rows, columns = ((size - k) // s * s + 1 for size, k, s in zip((height, width), kernel, stride, strict=True))
    x = reduce(torch.maximum, [x[..., i : i + rows : stride[0], :] for i in range(kernel[0])])
    return reduce(torch.maximum, [x[..., i : i + columns : stride[1]] for i in range(kernel[1])])


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
