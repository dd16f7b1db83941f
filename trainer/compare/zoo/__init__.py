"""Every architecture of transformers, as a tiny model, on every layout."""
