"""Tools to check transports on a machine with GPUs, which are installed with the package."""
