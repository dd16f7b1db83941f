"""Optimizers, schedulers and loss scaling."""
