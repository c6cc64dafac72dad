"""Transports with a fault each, and the published contract on them; a test starts pytest on this file and expects that
every test fails."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from nccl_transfer.testing.transports.suite import TransportContract
from nccl_transfer.transports.tcp import TcpReader, TcpTransport


class ForgetfulReader(TcpReader):
    """Reads rows of any epoch."""

    name = "forgetful"

    def read(self, source, ranges, deadline):
        return super().read(
            replace(source, epoch=0, adverts={"tcp": source.adverts[self.name]}), ranges, deadline
        )

    def why_not(self, source, host_id):
        return None


class PatientReader(ForgetfulReader):
    """Waits longer than it may."""

    name = "patient"

    def read(self, source, ranges, deadline):
        return super().read(source, ranges, deadline + 3)


class LeakingReader(ForgetfulReader):
    """Closes nothing."""

    name = "leaking"

    def close(self):
        KEPT.append(self)


KEPT: list[object] = []


class Faulty(TcpTransport):
    def __init__(self, reader: type[TcpReader]) -> None:
        self.name = reader.name  # type: ignore[misc]
        self.reader = reader  # type: ignore[method-assign,assignment]


forgetful, patient, leaking = Faulty(ForgetfulReader), Faulty(PatientReader), Faulty(LeakingReader)


class TestForgetful(TransportContract):
    """Of which `test_rows_of_another_epoch_are_refused` is run."""

    transport: ClassVar[str] = "test_faulty_transports:forgetful"


class TestPatient(TransportContract):
    """Of which `test_a_peer_that_hangs_ends_the_read_at_its_deadline` is run."""

    transport: ClassVar[str] = "test_faulty_transports:patient"


class TestLeaking(TransportContract):
    """Of which `test_nothing_is_left_open_here_or_there` is run."""

    transport: ClassVar[str] = "test_faulty_transports:leaking"
