"""Samples of RL: their order, their place, their files."""
