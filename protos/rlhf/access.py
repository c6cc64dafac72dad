"""The classes of RPC methods: read, call and administer."""

from __future__ import annotations

import enum

from rlhf.v1 import common_pb2


class Access(enum.IntEnum):
    """Class of an RPC method, and what a client may do: the methods of its class and of the lower ones. The values are
    those of rlhf.v1.Access."""

    READ = common_pb2.ACCESS_READ
    CALL = common_pb2.ACCESS_CALL
    ADMINISTER = common_pb2.ACCESS_ADMINISTER

    @property
    def word(self) -> str:
        """The class in keys, file names and messages: read, call or administer."""
        return self.name.lower()


LIBRARY_METHODS = {
    "/grpc.health.v1.Health/Check": Access.READ,
    "/grpc.health.v1.Health/List": Access.READ,
    "/grpc.health.v1.Health/Watch": Access.READ,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.READ,
}
"""Classes of the methods that gRPC's own libraries serve, by path."""
