"""The parts of compare_backends.py: read logs, compare them, write reports, and launch a matrix of runs."""
