"""Divergences of weights in another order in memory, and of several parameters at once."""

from __future__ import annotations

import torch

from bayeslim.priors import LogUniform, RelevanceDetermination


def test_weights_with_channels_last_have_the_same_divergence_and_gradients() -> None:
    torch.manual_seed(0)
    means = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    log_stds = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        mean = means.clone(memory_format=memory_format).requires_grad_()
        log_std = log_stds.clone(memory_format=memory_format).requires_grad_()
        kl = LogUniform().kl(mean, log_std.exp(), log_std)
        kl.backward()
        found.append((kl.detach(), mean.grad, log_std.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_several_parameters_at_once_have_the_sum_of_their_divergences() -> None:
    torch.manual_seed(0)
    pairs = [
        (torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64))
        for shape in ((3, 4), (2, 3, 5), (7,))
    ]
    for prior in (LogUniform(), LogUniform("approximate"), RelevanceDetermination()):
        assert prior.is_one_for_all
        together = prior.kl_of_all(pairs)
        apart = torch.stack([prior.kl(mean, log_std.exp(), log_std) for mean, log_std in pairs]).sum()
        torch.testing.assert_close(together, apart)
        means = [mean for mean, _ in pairs]
        grads = zip(torch.autograd.grad(together, means), torch.autograd.grad(apart, means), strict=True)
        for one, other in grads:
            torch.testing.assert_close(one, other)
