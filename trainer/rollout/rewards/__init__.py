"""Who scores: reward functions, reward models and reward servers."""
