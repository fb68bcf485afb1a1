"""Methods: ways to a posterior, one file each."""

from bayeslim.methods.base import Method, Terms
from bayeslim.methods.deep_ensemble import DeepEnsemble
from bayeslim.methods.laplace import Laplace
from bayeslim.methods.snapshot import Snapshot
from bayeslim.methods.student import Student
from bayeslim.methods.subnetwork import Subnetwork
from bayeslim.methods.variational import Variational

METHODS: dict[str, type[Method]] = {m.name: m for m in (Variational, Laplace, Student, DeepEnsemble, Snapshot)}
"""Methods by the name they are saved under; a new one is added here."""

__all__ = ["METHODS", "DeepEnsemble", "Laplace", "Method", "Snapshot", "Student", "Subnetwork", "Terms", "Variational"]
