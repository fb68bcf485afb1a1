"""Bayesian optimisation with BoTorch: a Bayesian network as the surrogate of an unknown function."""

from bayeslim.errors import MissingExtra

try:
    import botorch  # noqa: F401
except ImportError as error:
    raise MissingExtra("botorch", "botorch", "bayeslim.botorch") from error

from bayeslim.botorch.surrogate import Surrogate

__all__ = ["Surrogate"]
