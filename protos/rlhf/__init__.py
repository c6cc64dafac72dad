"""The contract of the cluster: protos, generated stubs, errors, configuration of a service."""

import os

# gRPC 1.80 gave Python its EventEngine, whose threads hand each message on three times before Python hears of it. The
# poller of the versions before, which 1.85 still has, leaves one thread between the socket and the event loop.
# Read while gRPC is imported: so what makes channels and servers imports this package first.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
