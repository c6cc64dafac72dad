"""Training engines behind one interface."""
