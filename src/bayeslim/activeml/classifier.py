"""`ActiveClassifier`: a `BayesianClassifier` that also learns from partly labelled data, and speaks as a committee.

The networks drawn from its posterior are the members of the committee, for the strategies that need one:

    strategy = GreedyBALD(sample_predictions_method_name="sample_proba", sample_predictions_dict={"n_samples": 50})
    chosen = strategy.query(X, y, ensemble=ActiveClassifier(classes=[0, 1]), batch_size=5)

`GreedyBALD`, `BatchBALD` and `QueryByCommittee` use it so. Strategies that need probabilities alone, such as
`UncertaintySampling`, take it as any other classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skactiveml.classifier import SklearnClassifier
from skactiveml.utils import MISSING_LABEL
from sklearn.utils.validation import check_is_fitted

from bayeslim.sklearn.estimators import BayesianClassifier


class ActiveClassifier(SklearnClassifier):
    """A Bayesian classifier for partly labelled data.

    Args:
        estimator: the classifier; None for `BayesianClassifier()`.
        classes: all classes, also those without a label yet.
        missing_label: the label of an input without one.
        cost_matrix: costs of confusing classes, as in scikit-activeml.
        random_state: a seed, for ties between classes.
    """

    def __init__(
        self,
        estimator: BayesianClassifier | None = None,
        classes: Sequence[Any] | None = None,
        missing_label: Any = MISSING_LABEL,
        cost_matrix: Any = None,
        random_state: Any = None,
    ):
        super().__init__(
            BayesianClassifier() if estimator is None else estimator,
            classes=classes,
            missing_label=missing_label,
            cost_matrix=cost_matrix,
            random_state=random_state,
        )

    def sample_proba(self, X: Any, n_samples: int = 32, random_state: int = 0) -> NDArray[Any]:
        """Compute the probabilities of networks drawn from the posterior, (S, N, C).

        A class without a label yet has the probability 0. With no label at all, all classes are equally probable.

        Args:
            X: inputs, (N, D).
            n_samples: the number of networks.
            random_state: a seed; the same one gives the same networks.
        """
        check_is_fitted(self)
        found = np.zeros((n_samples, len(X), len(self.classes_)))
        if not self.is_fitted_:
            return found + 1 / len(self.classes_)
        seen = np.searchsorted(self.classes_, self.estimator_.classes_)
        found[:, :, seen] = self.estimator_.sample_proba(X, n_samples, random_state)
        return found
