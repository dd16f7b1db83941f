"""Comparing runs: logs, locate, certificates, other trainers, the zoo of models, launching a matrix of runs."""
