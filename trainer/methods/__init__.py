"""One file per loss or algorithm; ppo.py holds the phases of RL."""
