"""Checks and measurements of the machine: GPUs, memory, forked ranks."""
