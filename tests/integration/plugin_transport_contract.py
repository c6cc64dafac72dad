"""The published contract on the transport of the installed example, as the author of a plug-in runs it; a test starts
pytest on this file where the example is installed."""

from nccl_transfer.testing.transports.suite import TransportContract


class TestUnix(TransportContract):
    transport = "unix"
