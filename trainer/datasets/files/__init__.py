"""Reading rows: JSON, CSV, tar, folders, the hub, mixtures, streams."""
