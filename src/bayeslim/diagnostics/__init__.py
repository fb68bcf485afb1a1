"""Diagnostics of chains of networks: convergence and effective sample sizes.

    bnn.fit(loader, epochs=50)              # bl.SGLD(chains=4), bl.HMC(chains=4), ...
    print(bl.diagnostics.summary(bnn, x))   # of the weights, and of the predictions for x
    bl.diagnostics.to_arviz(bnn)            # every plot and number of ArviZ

Weights of a network can be permuted and rescaled without any change of its function, so chains may disagree on them and
yet agree on all predictions: judge by the outputs.
"""

from bayeslim.diagnostics.estimators import autocorrelation, e_bfmi, ess, r_hat
from bayeslim.diagnostics.interchange import to_arviz
from bayeslim.diagnostics.summaries import Scores, Summary, summary

__all__ = ["Scores", "Summary", "autocorrelation", "e_bfmi", "ess", "r_hat", "summary", "to_arviz"]
