"""Loading a model, reward heads and LoRA."""
