"""Moment propagation: one pass that carries mean and variance of every activation, then draws of the outputs.

    z ~ N(m, diag(v) + shared noise)  through every layer,      p(y | x) = E[p(y | f)],  f ~ N(m, V) the last of them

for posteriors of independent Gaussian weights. The user's own modules run, on a tensor that carries both moments
(`Moments`). One table has a rule for each operation (`RULES`; see `rules`, `activations` and `shapes`). An operation
without a rule is refused by name.

Hernández-Lobato & Adams 2015, arXiv:1502.05336 · Wang & Manning 2013, "Fast dropout training" · Wu et al. 2019,
arXiv:1810.03958
"""

from bayeslim.predict.moments import activations, rules, shapes
from bayeslim.predict.moments.network import SAMPLES, predict
from bayeslim.predict.moments.tensor import RULES, Activation, Moments, NoRule, rule

__all__ = ["RULES", "SAMPLES", "Activation", "Moments", "NoRule", "activations", "predict", "rule", "rules", "shapes"]
