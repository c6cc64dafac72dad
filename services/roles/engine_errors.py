"""Translates errors of engines to the errors (`rlhf.errors`) that clients of the service receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.errors import CallCancelled, InvalidRequest, PeerFailed, Refused, RlhfError, UpdateRejected
from services.engines.agreement import PeerRankFailed
from services.engines.base import EngineOffloaded, InferenceStopped, NonFiniteGradient
from services.rollout.base import GenerationStopped


@contextmanager
def as_contract_errors(policy_version: int) -> Iterator[None]:
    """Context manager that re-raises errors of engines as the errors (`rlhf.errors`) that clients receive:
    NonFiniteGradient as UpdateRejected, PeerRankFailed as PeerFailed, GenerationStopped and InferenceStopped as
    CallCancelled, EngineOffloaded as Refused, ValueError and FileNotFoundError as InvalidRequest, any other OSError as
    RlhfError. Other errors pass unchanged.

    Args:
        policy_version: Current policy version, for the message of an update that is rejected.
    """
    try:
        yield
    except NonFiniteGradient as error:
        raise UpdateRejected(f"{error}; every rank is back on policy version {policy_version}") from error
    except PeerRankFailed as error:
        raise PeerFailed(str(error)) from error
    except (GenerationStopped, InferenceStopped) as error:
        raise CallCancelled(str(error)) from error
    except EngineOffloaded as error:
        raise Refused(str(error)) from error
    except (ValueError, FileNotFoundError) as error:
        raise InvalidRequest(str(error)) from error
    except OSError as error:
        raise RlhfError(f"{error.strerror}: {error.filename}" if error.strerror else str(error)) from error
