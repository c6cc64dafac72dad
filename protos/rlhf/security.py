"""The credentials of this process: certificates for mutual TLS, and tokens.

A process has one identity. Its entry point reads it from the configuration and adopts it before the first connection;
channels, servers and transports then ask `current`. The default, PLAINTEXT, has no credentials.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import grpc

from rlhf.access import Access
from rlhf.addresses import is_loopback
from rlhf.errors import ConfigError


@dataclass(frozen=True)
class Certificates:
    """PEM files of one process, each of which is read once, by `check` at the latest.

    Attributes:
        ca: Path of the certificates that sign those of all peers.
        certificate: Path of this process's certificate chain, for servers and clients alike.
        key: Path of its private key.
        server_name: Name that the certificate of every server has to contain; empty: the host that the client
            connects to.
    """

    ca: Path
    certificate: Path
    key: Path
    server_name: str = ""

    @cached_property
    def _server_context(self) -> ssl.SSLContext:
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED
        # A ticket would be data on an idle connection, which readers take for its end.
        context.num_tickets = 0
        return context

    @cached_property
    def _client_context(self) -> ssl.SSLContext:
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def check(self) -> None:
        """Raises ConfigError if a file cannot be read, is not PEM, or the key is not that of the certificate."""
        try:
            _ = self._server_context, self._client_context, self._contents
        except ssl.SSLError as error:
            raise ConfigError(
                f"security: {self.ca}, {self.certificate} and {self.key} are not a CA, a certificate and its key: "
                f"{error.reason or error}"
            ) from None
        except OSError as error:
            unreadable = next(
                (each for each in (self.ca, self.certificate, self.key) if not _is_readable(each)), ""
            )
            raise ConfigError(f"security: {unreadable or self.ca}: {error.strerror}") from None

    def accept_tls(self, connection: socket.socket) -> ssl.SSLSocket:
        """Wraps a connection that a server has accepted, without a handshake yet; the client must have a certificate of
        the CA."""
        return self._server_context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def connect_tls(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Wraps a client's connection to `host`, without a handshake yet; that raises OSError where it fails, as where
        the server has no certificate of the CA for its name."""
        return self._client_context.wrap_socket(
            connection, server_hostname=self.server_name or host, do_handshake_on_connect=False
        )

    @cached_property
    def server_credentials(self) -> grpc.ServerCredentials:
        """gRPC's credentials of a server, which requires a certificate of its clients."""
        ca, certificate, key = self._contents
        return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)

    @cached_property
    def channel_credentials(self) -> grpc.ChannelCredentials:
        """gRPC's credentials of a client, without a token."""
        ca, certificate, key = self._contents
        return grpc.ssl_channel_credentials(ca, key, certificate)

    @cached_property
    def _contents(self) -> tuple[bytes, bytes, bytes]:
        return self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes()

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key, password=_no_password)
        context.load_verify_locations(self.ca)
        return context


@dataclass(frozen=True)
class Security:
    """Credentials of a process, and what it allows others.

    Attributes:
        certificates: Files for mutual TLS; None: connections are in plaintext.
        tokens: Token of each class of methods that this process accepts as a server; empty: it asks for none, and
            every client with a certificate may do all. Needs certificates.
        token: Token that this process sends to all servers as a client; empty: one of `tokens`, by `token_for`.
        allow_plaintext: Whether servers may listen beyond loopback without certificates.
    """

    certificates: Certificates | None = None
    tokens: Mapping[Access, str] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)
    allow_plaintext: bool = False

    def grant(self, token: str) -> Access | None:
        """Returns the class that a client with this token may use; None if the token is not in `tokens`. Returns
        ADMINISTER if this process requires no token. Takes the same time for all tokens of the same length."""
        if not self.tokens:
            return Access.ADMINISTER
        given, granted = _digest(token), None
        for access, known in self.tokens.items():
            if hmac.compare_digest(_digest(known), given):
                granted = access
        return granted

    def token_for(self, access: Access) -> str:
        """Returns the token to send to a server whose methods up to class `access` are called: `token` if it is set,
        else that of the lowest sufficient class in `tokens`, or of the highest class if none suffices. Empty without
        tokens."""
        enough = [each for each in self.tokens if each >= access]
        chosen = min(enough, default=max(self.tokens, default=None))
        return self.token or (self.tokens[chosen] if chosen is not None else "")

    def check_listening(self, host: str, key: str) -> None:
        """Checks that a server may listen on a host.

        Args:
            host: Name or address, or a wildcard such as 0.0.0.0.
            key: Key of the configuration that names the host, for the message.

        Raises:
            ConfigError: Other hosts can connect, and connections would be in plaintext without `allow_plaintext`.
        """
        if not (self.certificates or self.allow_plaintext or is_loopback(host)):
            raise ConfigError(
                f"{key}: other hosts reach {host}, and anybody there could control the service: set ca, certificate "
                "and key in [security], or allow_plaintext = true on a network where everybody is trusted"
            )


PLAINTEXT = Security()
"""Credentials of a process that has none."""

_current = PLAINTEXT
_before = PLAINTEXT
_users = 0
_lock = threading.Lock()


def current() -> Security:
    """Returns the credentials of this process."""
    return _current


def adopt(security: Security) -> None:
    """Sets the credentials of this process, for connections and servers that are opened from now on."""
    global _current
    _current = security


@contextlib.contextmanager
def adopted(security: Security) -> Iterator[None]:
    """Context manager within which this process has these credentials. Several with equal credentials may be entered
    and left in any order; after the last one, the process has those of before the first.

    Raises:
        ConfigError: On entering, within another one with other credentials.
    """
    global _before, _users
    with _lock:
        if _users and security != _current:
            raise ConfigError("this process already has a run with other [security]; one at a time")
        if not _users:
            _before = _current
            adopt(security)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                adopt(_before)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _no_password() -> str:
    raise ConfigError(
        "security.key: the key is encrypted; services start without a terminal, so it must not be"
    )


def _is_readable(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False
