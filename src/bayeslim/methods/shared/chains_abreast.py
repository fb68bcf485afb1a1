"""Hamiltonian chains side by side: one vmapped potential answers all of them.

Each chain is a generator (`hamiltonian.py`) with its own step size, its own number of steps and its own random state.
In every round each says where it needs U and its gradient, and one evaluation answers all. No chain waits for another
one to end its trajectory, and none depends on how they interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayeslim.methods.shared.hamiltonian import Asking, T
from bayeslim.noise import RandomStream

Potentials = Callable[[Tensor], tuple[list[float], Tensor]]
"""A function from a vector of every chain, (S, D), to U of each and its gradients, (S, D)."""


def answered_together(chains: Sequence[Asking[T]], potentials: Potentials, streams: Sequence[RandomStream]) -> list[T]:
    """Answer the questions of all chains at once, and return their results.

    Args:
        chains: the chains, with vectors of one length.
        potentials: evaluates all chains; one that has ended is evaluated where it was last.
        streams: the random state of each.
    """
    answers: list[Any] = [None] * len(chains)  # the first are sent before there are questions
    vectors: dict[int, Tensor] = {}
    results: dict[int, T] = {}
    while True:
        for place, chain in enumerate(chains):
            if place in results:
                continue
            try:
                with streams[place]:
                    vectors[place] = chain.send(answers[place])
            except StopIteration as end:
                results[place] = end.value
        if len(results) == len(chains):
            return [results[place] for place in range(len(chains))]
        energies, gradients = potentials(torch.stack([vectors[place] for place in range(len(chains))]))
        answers = list(zip(energies, gradients.unbind(), strict=True))
