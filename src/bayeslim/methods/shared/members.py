"""The members of ensembles as networks of one stack, and what each ensemble gets of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from bayeslim.bayesian import Bayesian
from bayeslim.methods.shared.abreast import Stack
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of
from bayeslim.methods.shared.particle_method import gathered, snapshot
from bayeslim.methods.shared.reinitialise import check_resettable, reinitialise_
from bayeslim.posteriors.particles import Particles
from bayeslim.results import Fit
from bayeslim.types import device_of


def new_members(networks: Sequence[Bayesian], count: int) -> list[Bayesian]:
    """Copy every network `count` times, each with new random weights."""
    members = []
    for network in networks:
        check_resettable(network.model)
        for _ in range(count):
            one = copy.deepcopy(network)
            reinitialise_(one.model)
            members.append(one)
    return members


def joined_members(
    stack: Stack, networks: Sequence[Bayesian], members: Sequence[Bayesian], result: Fit
) -> list[Particles]:
    """Gather the members of every network after training; set its noise and counters.

    Args:
        stack: the members, trained.
        networks: those the members belong to.
        members: as many in turn for each network.
        result: of the training; its sums over members become means.
    """
    count, found = len(members) // len(networks), []
    for one in members:
        one.to(device_of(stack.model))
    stack.unstack(members)
    for place, network in enumerate(networks):
        own = members[place * count : (place + 1) * count]
        network.to(device_of(stack.model))
        network.step, network.num_data, network.steps_per_epoch = stack.step, stack.num_data, stack.steps_per_epoch
        average_noise_(network.likelihood, [noise_of(one.likelihood) for one in own])
        found.append(gathered([snapshot(one) for one in own]))
    result.averaged_over(count)
    return found
