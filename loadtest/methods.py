"""Methods that can be load-tested: those that leave a service unchanged."""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from rlhf.access import Access
from rlhf.contract import SERVICES, Method, role_methods
from rlhf.errors import ConfigError
from rlhf.plugins import PluginError
from rlhf.roles import find_role

HEALTH_CHECK = Method(
    service="grpc.health.v1.Health",
    name="Check",
    request=health_pb2.HealthCheckRequest,
    response=health_pb2.HealthCheckResponse,
    streams=False,
    takes_stream=False,
    spec=None,
    access=Access.READ,
)

OF_ALL = ("Describe", "Synchronize")


def offered(role: str) -> dict[str, Method]:
    """Returns the methods of a role that can be load-tested, by name: those that its declaration lists, and those of
    every service. Raises PluginError if the role is unknown."""
    own = {name: role_methods(role)[name] for name in find_role(role).load_tested}
    return {**own, **{name: SERVICES["worker"][name] for name in OF_ALL}, HEALTH_CHECK.name: HEALTH_CHECK}


def find_method(role: str, name: str) -> Method:
    """Finds a method of a role by its name in the proto or in Python.

    Raises:
        ConfigError: The role or the method is unknown, or the method changes the service.
    """
    try:
        methods = offered(role)
    except PluginError as error:
        raise ConfigError(f"ROLE: {error}") from error
    for method in methods.values():
        if name in (method.name, method.snake_name):
            return method
    others = {**role_methods(role), **SERVICES["worker"]}.values()
    if any(name in (method.name, method.snake_name) for method in others):
        raise ConfigError(
            f"--method: {name} cannot be load-tested, since it changes the service, belongs to a larger operation, or "
            f"needs weights that the service has in a run alone; allowed for {role}: {', '.join(methods)}"
        )
    raise ConfigError(f"--method: {role} has no method {name!r}; known: {', '.join(methods)}")
