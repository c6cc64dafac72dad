"""Generation with a rollout engine, for the services whose ranks generate."""
