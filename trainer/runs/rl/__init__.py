"""From flags to a run of reinforcement learning: roles, engines, rewards."""
