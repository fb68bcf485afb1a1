"""Slow answers for Gaussian posteriors: the precision of every pair of weights, written out."""

import math

import torch

from bayeslim.posteriors import Kronecker, KroneckerFactors


def psd(*shape, rank=None, generator, scale=1.0):
    """A random positive semi-definite matrix, of full rank unless told."""
    root = torch.randn(*shape, rank or shape[-1] + 2, generator=generator, dtype=torch.float64)
    return scale * root @ root.mT / root.shape[-1]


def coordinates(shape, groups, transposed):
    """(group, output, input) of every entry of a weight, in its own flat order."""
    kernel = math.prod(shape[2:])
    found = []
    for index in range(math.prod(shape)):
        first, rest = divmod(index, math.prod(shape[1:]))
        second, k = divmod(rest, kernel)
        if transposed:
            group, inner = divmod(first, shape[0] // groups)
            found.append((group, second, inner * kernel + k))
        else:
            group, output = divmod(first, shape[0] // groups)
            found.append((group, output, second * kernel + k))
    return found


class Layer:
    """One layer's plain matrices, and the posterior's factors made of them."""

    def __init__(self, name, shape, generator, *, groups=1, transposed=False, bias=True, rank=None, diagonal=False):
        self.name, self.shape, self.groups, self.transposed, self.bias = name, shape, groups, transposed, bias
        self.outputs = shape[1] if transposed else shape[0] // groups
        self.inputs = math.prod(shape) // (groups * self.outputs) + bias
        self.A = psd(groups, self.inputs, generator=generator, rank=rank)
        self.G = psd(groups, self.outputs, generator=generator, rank=rank, scale=3.0)
        if diagonal:
            self.A = torch.diag_embed(self.A.diagonal(dim1=1, dim2=2))
        self.diagonal = diagonal

    def factors(self):
        inputs = self.A[0].diagonal() if self.diagonal else self.A
        bias = f"{self.name}.bias" if self.bias else None
        return KroneckerFactors.of(
            f"{self.name}.weight", outputs=self.G, inputs=inputs, bias=bias, transposed=self.transposed
        )

    def mean(self, generator):
        params = {f"{self.name}.weight": torch.randn(self.shape, generator=generator, dtype=torch.float64)}
        if self.bias:
            count = self.groups * self.outputs
            params[f"{self.name}.bias"] = torch.randn(count, generator=generator, dtype=torch.float64)
        return params

    def precision(self):
        """G ⊗ A over [weight, bias] in their own flat orders."""
        where = coordinates(self.shape, self.groups, self.transposed)
        if self.bias:
            where += [(*divmod(b, self.outputs), self.inputs - 1) for b in range(self.groups * self.outputs)]
        g, o, i = torch.tensor(where).T
        same = (g[:, None] == g).double()
        return same * self.G[g[:, None], o[:, None], o] * self.A[g[:, None], i[:, None], i]


def network(seed=0, rank=None, prior=0.7, **kwargs):
    """A Kronecker posterior over every kind of layer and a rest, with its dense precision in the mean's order."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        Layer("fc", (4, 5), generator, rank=rank),
        Layer("conv", (4, 2, 2, 1), generator, groups=2, rank=rank),
        Layer("up", (4, 3, 2), generator, groups=2, transposed=True, bias=False, rank=rank),
        Layer("words", (6, 2), generator, transposed=True, bias=False, diagonal=True),
    ]
    mean, blocks = {}, []
    for layer in layers:
        mean |= layer.mean(generator)
        blocks.append(layer.precision())
    mean["norm.weight"] = torch.randn(3, generator=generator, dtype=torch.float64)
    rest = torch.rand(3, generator=generator, dtype=torch.float64)
    blocks.append(torch.diag(rest))
    posterior = Kronecker(mean, [layer.factors() for layer in layers], prior, rest={"norm.weight": rest}, **kwargs)
    return posterior, torch.block_diag(*blocks)


def flat(params):
    """Parameters as one vector; a leading dimension of samples stays where all have one."""
    return torch.cat([t.flatten() for t in params.values()])


def unflat(vector, like):
    parts = vector.split([t.numel() for t in like.values()])
    return {name: part.reshape(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def random_masks(mean, keep, generator):
    return {name: torch.rand(t.shape, generator=generator) < keep for name, t in mean.items()}


def dense_conditional(mean, precision, kept):
    """Mean and covariance of N(mean, precision⁻¹) given zeros, by the covariance form Σ_RR − Σ_RS Σ_SS⁻¹ Σ_SR."""
    sigma = torch.linalg.inv(precision)
    cut = ~kept
    conditional, covariance = torch.zeros_like(mean), torch.zeros_like(sigma)
    gain = sigma[kept][:, cut] @ torch.linalg.inv(sigma[cut][:, cut])
    conditional[kept] = mean[kept] - gain @ mean[cut]
    inner = sigma[kept][:, kept] - gain @ sigma[cut][:, kept]
    covariance[kept.nonzero(), kept.nonzero()[:, 0]] = inner
    return conditional, covariance


def assert_moments(samples, mean, covariance, deviations=5.0):
    """Sample means and covariances within a few standard errors, entry by entry."""
    n = len(samples)
    variance = covariance.diagonal()
    off = (samples.mean(0) - mean).abs()
    assert bool((off <= deviations * (variance / n).sqrt() + 1e-12).all())
    spread = (variance[:, None] * variance + covariance.square()).div(n).sqrt()
    assert bool(((samples.T.cov() - covariance).abs() <= deviations * spread + 1e-12).all())


def stack(samples):
    """Stacked parameters as (n, D)."""
    return torch.cat([t.flatten(1) for t in samples.values()], 1)


def eye(n):
    return torch.eye(n, dtype=torch.float64)
