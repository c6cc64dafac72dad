"""The contract between services and their clients: protos with their generated stubs, errors, channels and
addresses."""

import os

# Keeps messages of gRPC that are no errors out of logs, such as the one for each connection that a peer closes. gRPC
# reads it when it is imported, which the packages of the cluster do after this one.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
