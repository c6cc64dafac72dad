"""How the services start: launchers, ready configurations and the quickstart task."""
