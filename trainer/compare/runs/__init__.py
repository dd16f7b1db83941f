"""Launching runs, reading their logs and dumps, and comparing them."""
