"""Oracles of the collectives in plain torch: lists of per-rank tensors in, lists of per-rank tensors out."""
