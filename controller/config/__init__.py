"""Types of the configuration of a run, one module for each table of the config file."""
