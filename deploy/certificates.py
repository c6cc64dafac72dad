"""Makes a certificate authority, certificates and tokens, for tests and for clusters without an authority of their own,
by the program openssl."""

from __future__ import annotations

import ipaddress
import os
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from rlhf.access import Access
from rlhf.addresses import check_host
from rlhf.errors import ConfigError, RlhfError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPENSSL_TIMEOUT_S = 30.0
"""Timeout of one execution of openssl, in seconds; it takes milliseconds."""
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
TABLE = "security.toml"


def write_certificates(directory: Path, hosts: Sequence[str], days: int) -> str:
    """Writes ca, service and client (.pem and .key each), a token file of each class (read.token, ...), and
    security.toml, whose table `[security]` names them. Only this user may read the files.

    The certificate of services is for servers and for clients, since ranks connect to each other; that of clients
    (controllers, probes, load tests) cannot pretend to be a service.

    Args:
        directory: Directory of the files, which is made; it must not contain any of them.
        hosts: Names and addresses of the services' hosts, in addition to loopback.
        days: Days that the certificates are valid.

    Returns:
        The text of security.toml.

    Raises:
        ConfigError: A host is invalid, a file exists already, or the directory is a file.
        RlhfError: The files cannot be written, openssl is not installed, or it fails.
    """
    for host in hosts:
        try:
            check_host(host)
        except ValueError as error:
            raise ConfigError(f"--host {error}") from None
    directory = Path(os.path.realpath(directory))  # Path.resolve raises in a loop of links
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is no directory")
    paths = [directory / f"{name}.{kind}" for name in ("ca", "service", "client") for kind in ("pem", "key")]
    for path in [*paths, *(directory / f"{access.word}.token" for access in Access), directory / TABLE]:
        if path.exists():
            raise ConfigError(f"{path} exists already; certificates in use are not replaced")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Of mode 0700, and moved at the end: an error half way leaves none of the files.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".certs-") as made:
            text = _write_all(Path(made), directory, hosts, days)
            for path in Path(made).iterdir():
                path.rename(directory / path.name)
    except OSError as error:
        raise RlhfError(f"{error.filename or directory}: {error.strerror}") from None
    return text


def _write_all(made: Path, directory: Path, hosts: Sequence[str], days: int) -> str:
    """Writes the files into `made`, from where they go to `directory`; otherwise as `write_certificates`."""
    _make_authority(made, days)
    names = ",".join(_alternative_name(host) for host in (*LOOPBACK, *hosts))
    service = f"extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={names}\n"
    _make_certificate(made, "service", service, days)
    _make_certificate(made, "client", "extendedKeyUsage=clientAuth\n", days)
    for access in Access:
        _write(made / f"{access.word}.token", f"{secrets.token_urlsafe(32)}\n")
    text = tomli_w.dumps({"security": _table(directory)})
    _write(made / TABLE, text)
    return text


def _table(directory: Path) -> dict[str, str]:
    files = {"ca": "ca.pem", "certificate": "service.pem", "key": "service.key"}
    files |= {f"{access.word}_token_file": f"{access.word}.token" for access in Access}
    return {key: str(directory / name) for key, name in files.items()}


def _make_authority(directory: Path, days: int) -> None:
    _openssl(
        *("req", "-x509", *NEW_KEY, "-days", str(days), "-subj", "/CN=rlhf-cluster CA"),
        *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        *("-keyout", str(directory / "ca.key"), "-out", str(directory / "ca.pem")),
    )


def _make_certificate(directory: Path, name: str, extensions: str, days: int) -> None:
    """Makes a key and a certificate that the authority of `directory` signs, with extensions as lines KEY=VALUE."""
    request, options = directory / f"{name}.csr", directory / f"{name}.extensions"
    try:
        _write(
            options, f"basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n{extensions}"
        )
        _openssl(
            *("req", "-new", *NEW_KEY, "-subj", f"/CN=rlhf-cluster {name}"),
            *("-keyout", str(directory / f"{name}.key"), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", str(days), "-extfile", str(options)),
            *("-CA", str(directory / "ca.pem"), "-CAkey", str(directory / "ca.key")),
            *("-set_serial", f"0x{secrets.token_hex(16)}", "-out", str(directory / f"{name}.pem")),
        )
    finally:
        request.unlink(missing_ok=True)
        options.unlink(missing_ok=True)


def _alternative_name(host: str) -> str:
    bare = host.strip("[]")
    try:
        return f"IP:{ipaddress.ip_address(bare)}"
    except ValueError:
        return f"DNS:{bare}"


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _openssl(*arguments: str) -> None:
    """Executes openssl, whose files only this user may read; raises RlhfError where it is missing or fails."""
    try:
        ran = subprocess.run(
            ("openssl", *arguments),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=OPENSSL_TIMEOUT_S, umask=0o077,
        )  # fmt: skip
    except FileNotFoundError:
        raise RlhfError("openssl is not installed, which makes the certificates") from None
    except subprocess.TimeoutExpired:
        raise RlhfError(f"openssl {arguments[0]} did not end within {OPENSSL_TIMEOUT_S:g} s") from None
    if ran.returncode:
        raise RlhfError(f"openssl {arguments[0]}: {' '.join(ran.stderr.split())[-300:]}")
