"""Loading a model, LoRA, reward heads; attention, layers and losses."""
