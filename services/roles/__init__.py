"""The worker that roles with a model share."""
