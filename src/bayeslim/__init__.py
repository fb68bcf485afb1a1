"""bayeslim: make any PyTorch network Bayesian, read its uncertainty, prune it by its posterior."""
