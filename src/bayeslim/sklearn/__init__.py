"""Estimators for scikit-learn: Bayesian networks with `fit`, `predict` and `predict_interval`."""

from bayeslim.errors import MissingExtra

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise MissingExtra("scikit-learn", "sklearn", "bayeslim.sklearn") from error

from bayeslim.sklearn.estimators import BayesianClassifier, BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor"]
