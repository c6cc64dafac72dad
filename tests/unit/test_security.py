"""The table [security] and the files that it names."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy import certificates as authority
from deploy.certificates import TABLE, write_certificates
from deploy.cli import main
from deploy.launch import environment
from rlhf.access import Access
from rlhf.addresses import is_loopback
from rlhf.errors import ConfigError, RlhfError
from rlhf.security import PLAINTEXT, Security, adopted, current
from settings.reward import RewardTable
from settings.security import SecurityTable, load_security
from settings.strict import read_toml


def changed(certificates: Path, **changes: object) -> SecurityTable:
    """The table of a file, changed."""
    return SecurityTable.model_validate({**read_toml(certificates)["security"], **changes})


def token(certificates: Path, access: Access) -> str:
    return (certificates.parent / f"{access.word}.token").read_text().strip()


def test_without_a_table_a_process_has_no_credentials(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[services.actor]\n")
    assert load_security(path) == PLAINTEXT == current()


def test_each_token_grants_its_class_and_another_word_nothing(certificates: Path) -> None:
    security = load_security(certificates)
    for access in Access:
        assert security.grant(token(certificates, access)) is access
    for wrong in (
        "",
        "x" * 43,
        token(certificates, Access.READ)[:-1],
        token(certificates, Access.READ) + "x",
    ):
        assert security.grant(wrong) is None


def test_without_tokens_a_certificate_suffices(certificates: Path) -> None:
    files = {f"{access.word}_token_file": None for access in Access}
    assert changed(certificates, **files).load().grant("") is Access.ADMINISTER


def test_a_client_sends_the_token_that_suffices_or_that_of_the_environment(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = load_security(certificates)
    assert [security.token_for(access) for access in Access] == list(security.tokens.values())
    without_call = changed(certificates, call_token_file=None).load()
    assert without_call.token_for(Access.CALL) == token(certificates, Access.ADMINISTER)
    alone = changed(certificates, call_token_file=None, administer_token_file=None).load()
    assert alone.token_for(Access.CALL) == token(certificates, Access.READ)
    assert PLAINTEXT.token_for(Access.CALL) == ""
    monkeypatch.setenv("RLHF_TOKEN_FILE", str(certificates.parent / "read.token"))
    assert load_security(certificates).token_for(Access.ADMINISTER) == token(certificates, Access.READ)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"key": None}, "ca, certificate and key go together; given: ca, certificate"),
        ({"ca": None, "certificate": None, "key": None}, "tokens need ca, certificate and key"),
        ({"tokn": "x"}, "Extra inputs"),
    ],
)
def test_half_of_a_table_is_refused(certificates: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        changed(certificates, **changes)


def test_an_unknown_key_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[security]\ntoken_file = "x"\n')
    with pytest.raises(
        ConfigError, match=r"security.*token_file: unknown key.* Known keys: ca, certificate, key"
    ):
        load_security(path)


@pytest.mark.parametrize(
    ("key", "content", "expected"),
    [
        ("ca", None, "missing: No such file"),
        ("key", None, "missing: No such file"),
        ("certificate", "no PEM", "are not a CA, a certificate and its key"),
        ("ca", "no PEM", "are not a CA, a certificate and its key"),
        ("read_token_file", None, "missing: No such file"),
        ("read_token_file", "short", "not one word of 16 to 4,096 ASCII characters"),
        ("read_token_file", "two words of a length", "not one word of 16 to 4,096 ASCII characters"),
        ("read_token_file", "ünïcödé-is-not-allowed", "not one word of 16 to 4,096 ASCII characters"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_not_shown(
    certificates: Path, tmp_path: Path, key: str, content: str | None, expected: str
) -> None:
    path = tmp_path / "missing"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        changed(certificates, **{key: path}).load()
    assert str(path) in str(caught.value)
    assert content is None or content not in str(caught.value)


def test_a_key_of_another_certificate_is_refused(certificates: Path) -> None:
    with pytest.raises(ConfigError, match="are not a CA, a certificate and its key"):
        changed(certificates, key=certificates.parent / "client.key").load()


def test_one_token_for_two_classes_is_refused(certificates: Path) -> None:
    with pytest.raises(ConfigError, match="two of the token files contain the same token"):
        changed(certificates, call_token_file=certificates.parent / "read.token").load()


def test_secrets_are_not_in_what_is_printed_of_the_credentials(certificates: Path) -> None:
    shown = repr(load_security(certificates)) + repr(changed(certificates))
    for access in Access:
        assert token(certificates, access) not in shown


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.1.2.3", False),
        ("no-such-host.invalid", False),
    ],
)
def test_loopback_is_what_only_this_host_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_server_beyond_loopback_needs_certificates_or_leave(certificates: Path) -> None:
    PLAINTEXT.check_listening("127.0.0.1", "services.actor.address")
    load_security(certificates).check_listening("0.0.0.0", "services.actor.bind_host")
    Security(allow_plaintext=True).check_listening("10.1.2.3", "services.actor.address")
    with pytest.raises(ConfigError) as caught:
        PLAINTEXT.check_listening("0.0.0.0", "services.actor.bind_host")
    assert str(caught.value) == (
        "services.actor.bind_host: other hosts reach 0.0.0.0, and anybody there could control the service: set ca, "
        "certificate and key in [security], or allow_plaintext = true on a network where everybody is trusted"
    )


def test_credentials_are_those_of_before_after_a_block(certificates: Path) -> None:
    security, before = load_security(certificates), current()
    with contextlib.suppress(KeyError), adopted(security):
        assert current() is security
        raise KeyError
    assert current() is before


def test_runs_with_the_same_credentials_end_in_any_order(certificates: Path) -> None:
    before = current()
    first, second = (contextlib.ExitStack() for _ in range(2))
    first.enter_context(adopted(load_security(certificates)))
    second.enter_context(adopted(load_security(certificates)))
    first.close()
    assert current() == load_security(certificates)
    second.close()
    assert current() is before


@pytest.mark.parametrize("is_secured", [True, False])
def test_runs_with_other_credentials_are_one_at_a_time(certificates: Path, is_secured: bool) -> None:
    secured = load_security(certificates)
    one, other = (secured, PLAINTEXT) if is_secured else (PLAINTEXT, secured)
    with adopted(one):
        with pytest.raises(ConfigError, match="already has a run with other"), adopted(other):
            raise AssertionError
        assert current() is one
    with adopted(other):
        assert current() is other


def test_files_that_change_after_they_were_read_change_nothing(tmp_path: Path) -> None:
    write_certificates(tmp_path, (), days=1)
    certificates = load_security(tmp_path / TABLE).certificates
    assert certificates
    for path in (certificates.ca, certificates.certificate, certificates.key):
        path.unlink()
    assert certificates.channel_credentials is certificates.channel_credentials
    assert certificates.server_credentials is certificates.server_credentials


def test_ranks_do_not_inherit_the_credentials_of_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLHF_TOKEN_FILE", "RLHF_SECURITY", "OTHER"):
        monkeypatch.setenv(name, "x")
    variables = environment(RewardTable(role="reward", address="127.0.0.1:1"), "id")
    assert {name for name, value in variables.items() if value == "x"} == {"OTHER"}


def test_the_files_of_a_new_authority_are_for_this_user_alone(certificates: Path) -> None:
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in certificates.parent.iterdir()}
    assert set(files.values()) == {0o600}
    assert files.keys() == {
        *(f"{name}.{kind}" for name in ("ca", "service", "client") for kind in ("pem", "key")),
        *("read.token", "call.token", "administer.token", "security.toml"),
    }


def test_certificates_that_are_there_are_not_replaced(certificates: Path) -> None:
    before = {path: path.read_bytes() for path in certificates.parent.iterdir()}
    with pytest.raises(ConfigError, match=r"ca\.pem exists already"):
        write_certificates(certificates.parent, (), days=1)
    assert {path: path.read_bytes() for path in certificates.parent.iterdir()} == before


def test_an_error_half_way_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, openssl = [], authority._openssl

    def fail(*arguments: str) -> None:
        made.append(arguments)
        if len(made) == 3:
            raise RlhfError("no")
        openssl(*arguments)

    monkeypatch.setattr(authority, "_openssl", fail)
    with pytest.raises(RlhfError, match="no"):
        write_certificates(tmp_path, (), days=1)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    write_certificates(tmp_path, (), days=1)


@pytest.mark.parametrize("host", ["a:1", "a b", "unix", "a,DNS:evil"])
def test_a_host_that_is_none_gets_no_certificate(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        write_certificates(tmp_path / "new", (host,), days=1)
    assert not (tmp_path / "new").exists()


def test_without_openssl_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(Exception, match="openssl is not installed"):
        write_certificates(tmp_path / "new", (), days=1)


def test_certs_prints_the_table_for_the_hosts_that_it_is_given(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    ran = CliRunner().invoke(
        main, ["certs", str(directory), "--host", "node1", "--host", "[fd00::1]", "--days", "3"]
    )
    assert ran.exit_code == 0, ran.output
    config = tmp_path / "run.toml"
    config.write_text(ran.output)
    assert load_security(config).tokens.keys() == set(Access)
    shown = subprocess.run(
        ["openssl", "x509", "-in", str(directory / "service.pem"), "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("DNS:localhost", "IP Address:127.0.0.1", "DNS:node1", "IP Address:FD00:0:0:0:0:0:0:1"):
        assert name in shown.stdout
    again = CliRunner().invoke(main, ["certs", str(directory)])
    assert again.exit_code == 2
    assert "exists already" in again.stderr
