"""Active learning with scikit-activeml: a Bayesian network as classifier and as committee of its query strategies."""

from bayeslim.errors import MissingExtra

try:
    import skactiveml  # noqa: F401
except ImportError as error:
    raise MissingExtra("scikit-activeml", "activeml", "bayeslim.activeml") from error

from bayeslim.activeml.classifier import ActiveClassifier

__all__ = ["ActiveClassifier"]
