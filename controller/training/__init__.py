"""The interface that algorithms use: a run with its roles, steps, rewards and evaluation."""
