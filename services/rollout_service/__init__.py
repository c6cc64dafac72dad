"""The rollout role: generation without training, with weights of another service."""
