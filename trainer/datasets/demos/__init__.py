"""The embedded demo data and models."""
