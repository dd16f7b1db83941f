"""Kinds of attention: packed, ring, Ulysses, and the choice between kernels."""
