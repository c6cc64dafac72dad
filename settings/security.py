"""The table `[security]` of a config file: files for mutual TLS, and for tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import model_validator

from rlhf.access import Access
from rlhf.errors import ConfigError
from rlhf.security import Certificates, Security, adopt
from settings.strict import Strict, read_tables, validate

TOKEN_FILE = "RLHF_TOKEN_FILE"
"""Environment variable with the path of the token that this process sends to all servers as a client. If it is not
set, the process sends the token of the security table that its calls to a server require."""
SECURITY_FILE = "RLHF_SECURITY"
"""Environment variable with the value of the option --security."""
TOKEN = re.compile(r"[!-~]{16,4096}")


class SecurityTable(Strict):
    """Certificates and tokens of all processes that read this file, for gRPC and for the tcp transport alike. Without
    this table connections are in plaintext, and services listen on loopback alone. The values are paths of files:
    secrets stand nowhere else. See [security.md](security.md)."""

    ca: Path | None = None
    """PEM file with the certificates that sign those of all services and clients. Needs `certificate` and `key`."""
    certificate: Path | None = None
    """PEM file with the certificate of this process, which a service shows to clients and a client to services."""
    key: Path | None = None
    """PEM file with the private key of `certificate`, not encrypted."""
    server_name: str = ""
    """Name that the certificate of every service contains, where it does not contain the hosts of all addresses.
    Empty: the host of the address."""
    read_token_file: Path | None = None
    """File with the token for methods that show the state of services."""
    call_token_file: Path | None = None
    """File with the token for the methods of a run, and for reading."""
    administer_token_file: Path | None = None
    """File with the token for all methods: also for saving and loading of files, and for taking over another run. As
    soon as one of the three files is given, services ask each client for a token."""
    allow_plaintext: bool = False
    """true: services may listen beyond loopback without certificates. Every client that reaches them controls them."""

    @model_validator(mode="after")
    def _check(self) -> SecurityTable:
        given = [name for name in ("ca", "certificate", "key") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise ValueError(f"ca, certificate and key go together; given: {', '.join(given)}")
        if not given and self._token_files:
            raise ValueError("tokens need ca, certificate and key: in plaintext everybody could read them")
        return self

    @property
    def _token_files(self) -> dict[Access, Path]:
        files = {access: getattr(self, f"{access.word}_token_file") for access in Access}
        return {access: path for access, path in files.items() if path is not None}

    def load(self) -> Security:
        """Reads the files and returns the credentials.

        Raises:
            ConfigError: A file cannot be read, or does not contain what it should; the text names the file.
        """
        if self.ca is None or self.certificate is None or self.key is None:
            return Security(allow_plaintext=self.allow_plaintext)
        certificates = Certificates(self.ca, self.certificate, self.key, self.server_name)
        certificates.check()
        tokens = {access: _read_token(path) for access, path in self._token_files.items()}
        if len(set(tokens.values())) < len(tokens):
            raise ConfigError("security: two of the token files contain the same token")
        own = os.environ.get(TOKEN_FILE)
        token = _read_token(Path(own)) if own else ""
        return Security(certificates, tokens, token, self.allow_plaintext)


def load_security(path: Path, settings: tuple[str, ...] = ()) -> Security:
    """Reads the table `[security]` of a config file, of which nothing else is checked, and the files that it names.

    Args:
        path: The config file.
        settings: Overrides "key.path=value" of the file's values.

    Raises:
        ConfigError: The table is invalid, or a file that it names cannot be read.
    """
    return security_of(read_tables(path, settings), path)


def security_of(tables: Mapping[str, Any], path: Path) -> Security:
    """Returns the credentials of the table `[security]` among the tables of a config file; errors as `load_security`.

    Args:
        tables: The tables.
        path: The config file, for messages.
    """
    table = tables.get("security", {})
    if not isinstance(table, dict):
        raise ConfigError(f"config {path}: security: must be a table (given: {table!r})")
    return validate(SecurityTable, table, f"{path}: security").load()


def _adopt(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    if path is not None:
        try:
            tables = read_tables(path)
            if "security" not in tables:
                raise ConfigError(f"--security: {path} has no table [security]")
            adopt(security_of(tables, path))
        except ConfigError as error:
            raise click.UsageError(str(error), context) from None


security_option = click.option(
    "--security",
    type=click.Path(path_type=Path),
    envvar=SECURITY_FILE,
    expose_value=False,
    callback=_adopt,
    metavar="FILE",
    help="TOML file whose table [security] has the certificates and tokens to connect with, for example the config.",
)
"""Option of command lines without a config: the process adopts the credentials of a file. Its commands do not get it as
an argument."""


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"security: token file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    if not TOKEN.fullmatch(token):
        raise ConfigError(f"security: token file {path}: not one word of 16 to 4,096 ASCII characters")
    return token
