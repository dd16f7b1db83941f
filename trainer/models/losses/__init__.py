"""Losses and log-probabilities as pure functions of tensors."""
