"""Computes a transformer block as one node of autograd's graph."""
