"""From flags to a run: data, models, features, training, outputs."""
