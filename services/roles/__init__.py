"""What the roles with a model (actor, critic, reference, reward) share: `ModelWorker` and its parts."""
