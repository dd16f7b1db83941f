"""Runs of other trainers, compared with the plain loop."""
