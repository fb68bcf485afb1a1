"""The linearised network: Gaussian outputs from a Gaussian over the weights, in closed form.

    f(x; w) ≈ f(x; w*) + J(x) (w − w*)        w ~ N(w*, P⁻¹)        f(x) ~ N(f(x; w*), J P⁻¹ Jᵀ)

For Kronecker and independent weights, and for the full covariance of one layer, J P⁻¹ Jᵀ follows from each layer's
inputs and output gradients: no Jacobian is formed (`bayeslim.posteriors.functional`). Other posteriors take the
Jacobian of a few examples at a time. Where even that is too much, because a network has very many outputs or because a
pruned Kronecker posterior needs a linear solve for every row of J, `linearised_draws` samples the same distribution
with one directional derivative a draw.

The functions here work on a replica of the network, which belongs to one prediction: hooks go there.

Khan et al. 2019, arXiv:1906.01930 · Immer, Korzepa & Bauer 2021, arXiv:2008.08217
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bayeslim.curvature.diag import chunks_of
from bayeslim.curvature.example_gradients import Backward, ExampleGradients, LayerPass
from bayeslim.curvature.layers import MatrixLayer
from bayeslim.curvature.recurrent import unroll_
from bayeslim.curvature.rows import GradientRows
from bayeslim.curvature.second_derivatives import TwiceDifferentiable, check_not_once_differentiable
from bayeslim.curvature.sweep import accumulation_dtype, examples, with_gradients
from bayeslim.errors import UnsupportedModel
from bayeslim.posteriors import Conditioned, Dense, Gaussian, Kronecker
from bayeslim.posteriors.functional import diagonal_functional_covariance
from bayeslim.posteriors.kronecker_block import KroneckerBlock
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.types import Inputs, Params, batch_size, call, flattened

CPU_GRADIENT_BYTES = 2**25
DEVICE_GRADIENT_BYTES = 9 * 2**25
"""Memory that the output gradients of all layers may take together, unless one example takes more."""

MAX_NOISE_NUMBERS = 2**26
"""Numbers of weight noise that are drawn at once, unless one draw has more."""


def has_closed_form(posterior: Gaussian) -> bool:
    """Decide whether J P⁻¹ Jᵀ needs no iterative solve for every row of J."""
    return not (isinstance(posterior, Conditioned) and isinstance(posterior.base, Kronecker) and posterior.base.blocks)


def output_gaussians(
    model: nn.Module, posterior: Gaussian, batches: Iterable[Inputs]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs (b, ...) and covariances (b, O, O), a few examples at a time.

    The model is a replica in evaluation mode, at the posterior's mean, that no other thread uses.
    """
    gradients = ExampleGradients(unroll_(model), posterior.names)
    dtype = accumulation_dtype(model, None)
    step = 0
    for inputs in batches:
        total, start = batch_size(inputs), 0
        while start < total:
            parts = -(-(total - start) // step) if step else total - start
            count = -(-(total - start) // parts)
            stop = start + count
            with with_gradients(), gradients:  # not held across the yield: the thread's modes are the caller's there
                some = _recordable(inputs if count == total else examples(inputs, start, stop, total))
                some = _twice(some) if count == 1 else some
                outputs = gradients.forward(some)
                backward = _all_outputs(gradients, some, outputs)
                covariance = output_covariance(posterior, gradients, backward, dtype)
            yield outputs.detach()[:count], covariance[:count]
            start = stop
            step = step or _examples_at_once(backward)


def linearised_draws(
    model: nn.Module,
    posterior: Gaussian,
    batches: Callable[[], Iterable[Inputs]],
    samples: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw linearised outputs, f(x; w*) ± J(x) ε with ε ~ N(0, P⁻¹), (S, N, ...).

    They come in pairs of both signs, so that their mean is f(x; w*) and one derivative makes two. The model is as in
    `output_gaussians`.
    """
    at_once = max(1, MAX_NOISE_NUMBERS // posterior.num_parameters)
    draws: list[Tensor] = []
    while len(draws) < samples:
        count = min(at_once, (samples - len(draws) + 1) // 2)
        noise = posterior.noise(count, generator=generator)
        parts = [_outputs_and_slopes(unroll_(model), inputs, posterior.mean, noise) for inputs in batches()]
        centre = torch.cat([outputs for outputs, _ in parts])
        for slope in torch.cat([slopes for _, slopes in parts], 1):
            draws += [centre + slope, centre - slope]
    return torch.stack(draws[:samples])


@singledispatch
def output_covariance(
    posterior: Gaussian, gradients: ExampleGradients, backward: Backward, dtype: torch.dtype
) -> Tensor:
    """Compute J P⁻¹ Jᵀ, (B, O, O), of a batch; here from the Jacobian."""
    covariance = _zeros(backward, dtype)
    for start, J in _jacobians(gradients, backward, posterior.names, dtype):
        by_example = {name: value.transpose(0, 1) for name, value in J.items()}
        covariance[start : start + J[posterior.names[0]].shape[1]] = posterior.functional_covariance(by_example)
    return covariance


@output_covariance.register
def _(posterior: Conditioned, gradients: ExampleGradients, backward: Backward, dtype: torch.dtype) -> Tensor:
    if isinstance(posterior.base, Kronecker) and not posterior.base.blocks:
        return _by_layer((), posterior.variance, gradients, backward, dtype)
    return output_covariance.dispatch(Gaussian)(posterior, gradients, backward, dtype)


@output_covariance.register
def _(posterior: Kronecker, gradients: ExampleGradients, backward: Backward, dtype: torch.dtype) -> Tensor:
    variance = {name: precision.reciprocal() for name, precision in posterior.rest.items()}
    return _by_layer(posterior.blocks, variance, gradients, backward, dtype)


@output_covariance.register
def _(posterior: Dense, gradients: ExampleGradients, backward: Backward, dtype: torch.dtype) -> Tensor:
    covariance = _zeros(backward, dtype)
    layer = _only_layer(posterior, gradients)
    if layer is not None:
        seen = backward.layers[gradients.direct[layer.weight][0]]
        parts = list(_features(seen, layer, dtype))
        if all(a.shape[1] == 1 for _, a, _ in parts):
            sigma = _layer_covariance(posterior, layer).to(dtype)
            for start, a, g in parts:
                a = torch.cat([a, torch.ones_like(a[..., :1])], -1)[:, 0] if layer.bias is not None else a[:, 0]
                between = torch.einsum("bopj,bj->bop", torch.einsum("bi,oipj->bopj", a, sigma), a)
                g = g[:, :, 0].transpose(0, 1)
                covariance[start : start + len(a)] = g @ between @ g.mT
            return covariance
    chosen = {name: posterior.indices[name] for name in posterior.mean if name in posterior.indices}
    for start, J in GradientRows(gradients, chosen, dtype)(backward):
        outputs, some, size = J.shape
        white = torch.linalg.solve_triangular(
            posterior.factor, J.reshape(-1, size).mT.to(posterior.factor), upper=False
        )
        white = white.mT.reshape(outputs, some, size).transpose(0, 1)
        covariance[start : start + some] = (white @ white.mT).to(dtype)
    return covariance


def _by_layer(
    blocks: Sequence[KroneckerBlock],
    variance: Mapping[str, Tensor],
    gradients: ExampleGradients,
    backward: Backward,
    dtype: torch.dtype,
) -> Tensor:
    """Sum the covariances of Kronecker layers and of independent weights."""
    covariance = _zeros(backward, dtype)
    independent = _layers_of(variance, gradients)
    apart = [block for block in blocks if not _is_direct(block.layer, gradients)]
    for block in blocks:
        if block not in apart:
            for start, a, g in _features(_seen(block.layer, gradients, backward), block.layer, dtype):
                covariance[start : start + len(a)] += block.functional_covariance(a, g).to(dtype)
    for layer in independent:
        for start, a, g in _features(_seen(layer, gradients, backward), layer, dtype):
            covariance[start : start + len(a)] += diagonal_functional_covariance(layer, variance, a, g).to(dtype)
    done = {name for layer in independent for name in layer.names}
    names = [name for name in variance if name not in done] + [name for b in apart for name in b.layer.names]
    for start, J in _jacobians(gradients, backward, names, dtype) if names else ():
        image = {name: J[name] * variance[name].to(dtype) for name in J if name in variance}
        for block in apart:
            image |= block.layer.params(block.covariance_product(block.layer.matrix(J).to(block.eigenvalues)))
        for name in names:
            left, right = flattened(J[name], 2).transpose(0, 1), flattened(image[name], 2).to(dtype).transpose(0, 1)
            covariance[start : start + len(left)] += left @ right.mT
    return covariance


def _layers_of(variance: Mapping[str, Tensor], gradients: ExampleGradients) -> list[LayerMatrix]:
    """List the layers of these independent parameters that hooks can read."""
    leaves: dict[str, dict[str, str]] = {}
    for name, (path, leaf) in gradients.direct.items():
        if name in variance and isinstance(gradients.views[path], MatrixLayer):
            leaves.setdefault(path, {})[leaf] = name
    found = []
    for path, own in leaves.items():
        view = gradients.views[path]
        if isinstance(view, MatrixLayer) and "weight" in own:
            shape, groups = view.layer.shape, view.groups
            found.append(LayerMatrix(own["weight"], own.get("bias"), shape, groups, view.inputs_first))
    return found


def _is_direct(layer: LayerMatrix, gradients: ExampleGradients) -> bool:
    """Check that hooks on the layer see its whole gradient."""
    return all(name in gradients.direct for name in layer.names)


def _seen(layer: LayerMatrix, gradients: ExampleGradients, backward: Backward) -> LayerPass:
    return backward.layers[gradients.direct[layer.weight][0]]


def _features(seen: LayerPass, layer: LayerMatrix, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield a layer's features and output gradients in chunks of examples.

    They are (b, T, groups · I) in the weight's order, and (K, b, T, groups · O).
    """
    view = seen.view
    assert isinstance(view, MatrixLayer)
    for start, stop in chunks_of(seen, view):
        matrices = seen.matrices(start, stop, dtype)
        if matrices is not None:
            a, g = matrices
            a = a if view.order is None else a[..., view.order]
            yield start, a.flatten(2), g.flatten(3)


def _jacobians(
    gradients: ExampleGradients, backward: Backward, names: Sequence[str], dtype: torch.dtype
) -> Iterator[tuple[int, Params]]:
    """Yield Jacobians of parameters, (O, b, *shape) by name, in chunks of examples."""
    shapes = {name: gradients.model.get_parameter(name).shape for name in names}
    for start, found in GradientRows(gradients, dict.fromkeys(names), dtype)(backward):
        parts = found.split([shape.numel() for shape in shapes.values()], -1)
        yield start, {n: p.reshape(*p.shape[:2], *shapes[n]) for n, p in zip(names, parts, strict=True)}


def _only_layer(posterior: Dense, gradients: ExampleGradients) -> LayerMatrix | None:
    """Find the one ungrouped layer whose weights are all weights of the posterior."""
    whole = len(posterior.places) == posterior.layout.size
    layers = _layers_of(posterior.mean, gradients) if whole else []
    if len(layers) != 1 or set(layers[0].names) != set(posterior.names) or layers[0].groups != 1:
        return None
    return layers[0]


def _layer_covariance(posterior: Dense, layer: LayerMatrix) -> Tensor:
    """Arrange P⁻¹ by the entries of the layer's matrix, (O, I, O, I)."""
    numbers = posterior.layout.params(torch.arange(posterior.layout.size, device=posterior.places.device))
    where = posterior.places.argsort()
    order = where[layer.matrix(numbers).flatten()]
    _, outputs, inputs = layer.size
    return posterior.covariance[order][:, order].view(outputs, inputs, outputs, inputs)


def _all_outputs(gradients: ExampleGradients, inputs: Inputs, outputs: Tensor) -> Backward:
    """Send every output of every example backwards, as one pass."""
    count = outputs[0].numel()
    eye = torch.eye(count, dtype=outputs.dtype, device=outputs.device)
    columns = (row.expand(outputs.shape[0], count).reshape(outputs.shape) for row in eye)
    first, *others = gradients.backward(inputs, outputs, columns)
    if not others:
        return first
    layers = {}
    for path, seen in first.layers.items():
        calls = []
        for n, (x, shape, g) in enumerate(seen.calls):
            calls.append((x, shape, torch.cat([g, *(other.layers[path].calls[n][2] for other in others)])))
        layers[path] = LayerPass(seen.view, calls)
    return Backward(inputs, torch.cat([first.columns, *(other.columns for other in others)]), layers)


def _recordable(inputs: Inputs) -> Inputs:
    """Copy tensors that were made under inference mode: autograd refuses to save them."""
    return tree_map(lambda v: v.clone() if isinstance(v, Tensor) and v.is_inference() else v, inputs)


def _twice(inputs: Inputs) -> Inputs:
    """Repeat a single example.

    Through BatchNorm on a CPU, torch's gradients of a single example may be wrong: the memory layout of a tensor with
    one example is ambiguous, and the backward pass may take another than the forward pass took.
    """
    return tree_map(lambda v: torch.cat([v, v]) if isinstance(v, Tensor) and v.ndim and len(v) == 1 else v, inputs)


def _examples_at_once(backward: Backward) -> int:
    gradients = sum(g[:, 0].numel() * g.element_size() for seen in backward.layers.values() for _, _, g in seen.calls)
    budget = CPU_GRADIENT_BYTES if backward.columns.device.type == "cpu" else DEVICE_GRADIENT_BYTES
    return max(1, budget // max(1, gradients + backward.columns[:, 0].numel() * backward.columns.element_size()))


def _zeros(backward: Backward, dtype: torch.dtype) -> Tensor:
    count = backward.columns.shape[0]
    return backward.columns.new_zeros(backward.examples, count, count, dtype=dtype)


def _outputs_and_slopes(
    model: nn.Module, inputs: Inputs, mean: Mapping[str, Tensor], noise: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute f(x; w*), (B, ...), and J(x) ε for every ε of the noise, (S, B, ...).

    J ε is the derivative along u of the backward pass Jᵀ u: one more backward pass for every ε. Forward-mode
    derivatives would take less time, but torch allows only one thread at a time to compute them.
    """
    params = {name: value.detach().requires_grad_() for name, value in mean.items()}
    with with_gradients(), TwiceDifferentiable():
        outputs = call(model, _recordable(inputs), params)
        along = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, list(params.values()), along, create_graph=True, allow_unused=True)
        used = {name: g for name, g in zip(params, pulled, strict=True) if g is not None and g.requires_grad}
        count = len(next(iter(noise.values())))
        if not used:
            return outputs.detach(), outputs.detach().new_zeros(count, *outputs.shape)
        slopes = [_slope(used, along, {name: values[k] for name, values in noise.items()}) for k in range(count)]
    return outputs.detach(), torch.stack(slopes)


def _slope(pulled: Mapping[str, Tensor], along: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    """Differentiate the backward pass Jᵀ u along u, which gives J ε."""
    try:
        check_not_once_differentiable(*pulled.values())
        directions = [noise[name].to(g) for name, g in pulled.items()]
        return torch.autograd.grad(list(pulled.values()), along, directions, retain_graph=True)[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedModel(
            "Draws of the linearised network differentiate its backward pass, and torch cannot do that for an "
            f'operation of the network ({error}). Predict with how="sample", which draws weights and differentiates '
            "nothing."
        ) from error
