"""Paths of a network through its forward: the proof that networks agree at all sizes, in three steps.

1. `path_at` finds the path that some inputs take. It runs the network on inputs whose sizes are symbols (`symbolic`).
   Every condition on sizes that the run meets, with the answer it gets there, is a **guard**. Inputs that satisfy all
   guards of a path take it: the same operations run, or the same error is raised.
2. `paths_beyond` finds the others. Sizes that violate a guard of a known path, and satisfy the guards of no known one,
   take a new path. Its guards are violated in turn, until no such sizes are found: then the known paths cover all
   sizes. This is concolic testing. The search for sizes is bounded (`guards.violations`).
3. `proof` compares the networks at inputs of each path. Before constants are folded it also asks that every other path
   fails, or makes the calls of the traced one: an operation computes the same function at all sizes.

Some questions need fewer paths. Networks that are equal wherever the same code runs differ only where the network's
own code branches otherwise. Those guards are the **decisions** of a path. The others come from torch's operations, such
as a slice that ends before its tensor does.

A path that depends on values is not known. None stands for it, and whoever asks gives up the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from bayeslim.compact.example import takes
from bayeslim.compact.guards import Guard, Size, all_hold, resized_to, sizes_of, violations
from bayeslim.compact.symbolic import NeedsValues, SymbolicRun, number_at
from bayeslim.compact.trace import quiet_copy
from bayeslim.types import Inputs

MAX_PATHS = 12
"""The number of other paths of a network that are followed."""


@dataclass(frozen=True)
class Path:
    """A path of a network through its forward.

    Attributes:
        guards: the conditions on the inputs under which the network takes it.
        decisions: those of them on which the network's own code branches.
        calls: the functions of torch that it calls, each with its numbers, as expressions of the sizes.
        sizes: the sizes by the symbols of those expressions.
        fails: whether the network raises an error on it.
    """

    guards: tuple[Guard, ...]
    decisions: tuple[Guard, ...]
    calls: tuple[tuple[str, tuple[Any, ...]], ...]
    sizes: Mapping[Any, Size]
    fails: bool

    def calls_at(self, leaves: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the calls with their numbers at the sizes of some inputs."""
        values = {symbol: size.value(leaves) for symbol, size in self.sizes.items()}
        return [(name, tuple(number_at(value, values) for value in numbers)) for name, numbers in self.calls]


def path_at(network: nn.Module, inputs: Inputs) -> Path | None:
    """Find the path that a network takes at some inputs.

    It is None if it depends on their values.

    Args:
        network: a copy of a network in eval mode on the CPU, which may keep tensors without values afterwards.
        inputs: the inputs.
    """
    run, fails = SymbolicRun(inputs), False
    try:
        run.start(network)
    except NeedsValues:
        return None
    except Exception:
        if takes(quiet_copy(network), inputs):  # the error is one of the symbolic run alone
            return None
        fails = True
    try:
        return Path(run.guards(), run.decisions(), tuple(run.calls), run.sizes, fails)
    except (ValueError, TypeError):  # a condition that no guard can state
        return None


def paths_beyond(
    network: nn.Module,
    known: Sequence[tuple[Guard, ...]],
    example: Inputs,
    *,
    within: Sequence[Guard] = (),
    by_decisions: bool = False,
) -> Iterator[tuple[Inputs, Path | None]]:
    """Find the paths of a network besides known ones.

    Each comes with inputs that take it. None stands for a path that is not known, and for more than `MAX_PATHS`; other
    paths that violate the same guard are not followed then.

    Args:
        network: the network, in eval mode on the CPU.
        known: the guards of known paths.
        example: inputs that satisfy all of them.
        within: guards that the inputs of all paths satisfy.
        by_decisions: tell paths apart by the decisions of the network's own code alone.
    """
    leaves, spec = pytree.tree_flatten(example)
    covered = list(known)
    unexplored = [(guards, sizes_of(leaves)) for guards in known]
    while unexplored:
        guards, sizes = unexplored.pop()
        for guard in guards:
            if guard in within:
                continue
            if not guard.can_be_violated(sizes):
                yield example, None
                return
            for other in violations(guard, sizes):
                if not all_hold(within, other) or any(all_hold(path, other) for path in covered):
                    continue
                resized = [resized_to(leaf, new) for leaf, new in zip(leaves, other, strict=True)]
                inputs = pytree.tree_unflatten(resized, spec)
                found = path_at(quiet_copy(network), inputs) if len(covered) <= MAX_PATHS else None
                yield inputs, found
                if found is None:
                    break
                covered.append(found.decisions if by_decisions else found.guards)
                unexplored.append((covered[-1], other))
