"""Settings of services: the types of the config file's `[services.NAME]` tables, which launcher, ranks and controller
read."""
