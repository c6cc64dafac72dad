"""Settings of services: the tables that their launcher, their ranks and the controller read."""
