"""Layers of a model on one rank: they call kernels and the collectives that they are given."""
