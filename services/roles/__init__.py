"""`ModelWorker`, the worker of roles with a model (actor, critic, reference, reward), and its parts."""
