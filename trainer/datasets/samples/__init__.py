"""Tokenized samples of each method, and their ledger."""
