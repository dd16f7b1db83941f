"""State to resume from: shards, manifests and the state of a run."""
