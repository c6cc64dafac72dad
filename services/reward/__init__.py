"""Services of the reward role: rewards and cost models."""
