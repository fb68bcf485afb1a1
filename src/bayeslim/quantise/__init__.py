"""Quantisation: few levels for every weight, with bits allocated and weights rounded by the posterior."""
