"""Entropy coding: a network as one small file, and back to the bit."""
