"""The RPC methods of all services, read from the descriptors of the protos."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from rlhf.access import Access
from rlhf.errors import InvalidRequest
from rlhf.plugins import PluginError, load_object
from rlhf.roles import BUILT_IN, find_role
from rlhf.v1 import common_pb2, weights_pb2

PLAIN_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 1 << 30),
    ("grpc.max_send_message_length", 1 << 30),
    ("grpc.absolute_max_metadata_size", 64 << 10),
    ("grpc.enable_http_proxy", 0),
)
"""gRPC options of a channel to any server: messages of up to 1 GiB instead of 4 MiB, metadata of up to 64 KiB for
tracebacks, and no keepalive pings, for which a server with default options would close the connection."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *PLAIN_OPTIONS,
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""gRPC options of clients and servers of the cluster: PLAIN_OPTIONS with keepalive pings. A stopped peer is detected
within 10 s; a busy peer stays connected, since gRPC's own threads answer pings."""


@dataclass(frozen=True)
class Method:
    """One RPC method of a service.

    Attributes:
        service: Full name of the service, "rlhf.v1.ActorService".
        name: Name of the method, "GenerateSequences".
        request, response: Message classes.
        streams: Whether the method streams responses.
        takes_stream: Whether the method takes a stream of requests.
        spec: Its MethodSpec, the transfer protocol and batch columns; None if the .proto declares none.
        access: Class of the method. If the .proto declares none: CALL with a MethodSpec, else ADMINISTER.
    """

    service: str
    name: str
    request: type
    response: type
    streams: bool
    takes_stream: bool
    spec: Any | None
    access: Access

    @functools.cached_property
    def path(self) -> str:
        """gRPC path of the method, "/package.Service/Method"."""
        return f"/{self.service}/{self.name}"

    @functools.cached_property
    def snake_name(self) -> str:
        """Name of the method in Python: "generate_sequences" for GenerateSequences."""
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in self.name).lstrip("_")

    def parse(self, request: bytes) -> Any:
        """Parses a serialized request of this method and returns the message.

        Raises:
            InvalidRequest: The bytes cannot be parsed.
        """
        try:
            return self.request.FromString(request)  # type: ignore[attr-defined]
        except DecodeError as error:
            raise InvalidRequest(f"{self.name}: the request is no {self.request.__name__}: {error}") from None

    @functools.cached_property
    def takes_rows(self) -> bool:
        """Whether requests of the method have a field `batch`."""
        return "batch" in self.request.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]

    @functools.cached_property
    def moves_weights(self) -> bool:
        """Whether requests of the method have a field `transfer`, of type WeightTransfer."""
        field = self.request.DESCRIPTOR.fields_by_name.get("transfer")  # type: ignore[attr-defined]
        return field is not None and field.message_type is weights_pb2.WeightTransfer.DESCRIPTOR

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the batch columns that a request must contain; empty without a MethodSpec."""
        return tuple(self.spec.inputs) if self.spec else ()

    @functools.cached_property
    def optional_inputs(self) -> tuple[str, ...]:
        """Names of the batch columns that a request may contain; empty without a MethodSpec."""
        return tuple(self.spec.optional_inputs) if self.spec else ()

    @functools.cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the batch columns of a response; empty without a MethodSpec."""
        return tuple(self.spec.outputs) if self.spec else ()


def _methods(service: ServiceDescriptor) -> dict[str, Method]:
    found = {}
    for method in service.methods:
        options: Any = method.GetOptions()
        spec = options.Extensions[common_pb2.method] if options.HasExtension(common_pb2.method) else None
        found[method.name] = Method(
            service=service.full_name,
            name=method.name,
            request=message_factory.GetMessageClass(method.input_type),
            response=message_factory.GetMessageClass(method.output_type),
            streams=method.server_streaming,
            takes_stream=method.client_streaming,
            spec=spec,
            access=Access(
                options.Extensions[common_pb2.access] or (Access.CALL if spec else Access.ADMINISTER)
            ),
        )
    return found


@functools.cache
def service_methods(service: str) -> Mapping[str, Method]:
    """Returns the methods of a gRPC service by name. `service` is "module:Service" with a generated module.

    Raises:
        PluginError: The module cannot be imported, or has no such service.
    """
    module, _, name = service.partition(":")
    file = load_object(f"{module}:DESCRIPTOR", FileDescriptor)
    if name not in file.services_by_name:
        known = ", ".join(file.services_by_name) or "none"
        raise PluginError(f"{service!r}: {file.name} has no service {name!r}; it has: {known}")
    return _methods(file.services_by_name[name])


_WORKER = service_methods("rlhf.v1.worker_pb2:WorkerService")


@functools.cache
def role_methods(role: str) -> Mapping[str, Method]:
    """Returns the methods of a role's own service, by name in the proto.

    Args:
        role: Name of the role, as `rlhf.roles.find_role` takes it.

    Raises:
        PluginError: There is no such role, its service cannot be imported, or a method of it cannot be called on a
            group of ranks: it streams, has the name of a method of WorkerService, does not declare the option
            (rlhf.v1.method), or its request has no field `call` of type Call, or its response no `outcome` of type
            Outcome.
    """
    methods = service_methods(find_role(role).service)
    for method in methods.values():
        if defect := _defect(method):
            raise PluginError(f"role {role}: {method.path} {defect}")
    return methods


def _defect(method: Method) -> str:
    """Returns the reason that a method cannot be called on a group of ranks; empty where it can."""
    if method.name in _WORKER:
        return "has the name of a method of WorkerService, which every rank serves too"
    if method.spec is None:
        return "does not declare its transfer protocol, the option (rlhf.v1.method)"
    if method.streams or method.takes_stream:
        return "streams; a method of a role has one request and one response"
    wanted = ((method.request, "call", common_pb2.Call), (method.response, "outcome", common_pb2.Outcome))
    for message, name, kind in wanted:
        field = message.DESCRIPTOR.fields_by_name.get(name)  # type: ignore[attr-defined]
        if field is None or field.message_type is not kind.DESCRIPTOR:
            return f"needs a field {name} of type {kind.DESCRIPTOR.full_name} in {message.__name__}"
    return ""


SERVICES: Mapping[str, Mapping[str, Method]] = {
    **{role: role_methods(role) for role in BUILT_IN},
    "transfer": service_methods("rlhf.v1.transfer_pb2:TransferService"),
    "worker": _WORKER,
}
"""Methods of this project's services by short name ("actor", "critic", "reference", "reward", "transfer", "worker"),
then by name of the method ("GenerateSequences"). `role_methods` has those of any role."""


def group_methods(role: str) -> dict[str, Method]:
    """Returns the methods that a controller calls on all ranks of a service of this role, by name in Python: the
    methods of the role's service, and those of WorkerService that declare a transfer protocol.

    Raises:
        PluginError: `role_methods` raised it.
    """
    both = [*role_methods(role).values(), *SERVICES["worker"].values()]
    return {method.snake_name: method for method in both if method.spec is not None}
