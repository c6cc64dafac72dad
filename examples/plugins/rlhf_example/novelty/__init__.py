"""The parts of role `novelty`: proto, table, worker and group."""
