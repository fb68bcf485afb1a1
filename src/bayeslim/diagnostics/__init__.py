"""Diagnostics of chains of networks: convergence and effective sample sizes.

    bnn.fit(loader, epochs=50)                       # bl.SGLD(chains=4), bl.HMC(chains=4), ...
    print(bl.diagnostics.summary(bnn, x))            # of the weights, and of the predictions for x
    print(bl.diagnostics.temperature(bnn, loader))   # whether the networks lie too far apart, or too close
    bl.diagnostics.to_arviz(bnn)                     # every plot and number of ArviZ

Weights of a network can be permuted and rescaled without any change of its function, so chains may disagree on them and
yet agree on all predictions: judge by the outputs.
"""

from bayeslim.diagnostics.estimators import autocorrelation, e_bfmi, ess, r_hat
from bayeslim.diagnostics.interchange import to_arviz
from bayeslim.diagnostics.summaries import Scores, Summary, summary
from bayeslim.diagnostics.temperature import Temperature, temperature

__all__ = [
    "Scores",
    "Summary",
    "Temperature",
    "autocorrelation",
    "e_bfmi",
    "ess",
    "r_hat",
    "summary",
    "temperature",
    "to_arviz",
]
