"""The training loop, checkpointing and resume."""
