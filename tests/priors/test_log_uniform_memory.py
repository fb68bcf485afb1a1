"""The log-uniform divergence of weights in another order in memory."""

from __future__ import annotations

import torch

from bayeslim.priors import LogUniform


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
