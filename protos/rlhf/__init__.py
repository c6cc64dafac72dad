"""The contract of the cluster: protos, generated stubs, errors, configuration of a service."""
