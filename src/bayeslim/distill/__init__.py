"""Distillation: train one plain network to predict as a posterior does."""
