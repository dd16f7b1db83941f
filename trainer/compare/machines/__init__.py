"""Ranks that are forks of this process."""
