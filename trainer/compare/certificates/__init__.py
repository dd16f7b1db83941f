"""Certificates of a run, and their verification by a replay."""
