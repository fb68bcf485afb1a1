"""Prediction: from a posterior over weights to a distribution over targets."""
