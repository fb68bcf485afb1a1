"""Decisions from predictions: calibrated probabilities, sets and intervals that cover, predictors that abstain."""
