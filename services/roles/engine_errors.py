"""Translates errors of engines to the errors (`rlhf.errors`) that clients of the service receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.errors import CallCancelled, InvalidRequest, PeerFailed, Refused, RlhfError
from services.engines.agreement import PeerRankFailed
from services.engines.base import EngineOffloaded, InferenceStopped
from services.rollout.base import GenerationStopped


@contextmanager
def as_contract_errors() -> Iterator[None]:
    """Context manager that re-raises errors of engines as the errors (`rlhf.errors`) that clients receive:
    PeerRankFailed as PeerFailed, GenerationStopped and InferenceStopped as CallCancelled, EngineOffloaded as Refused,
    ValueError and FileNotFoundError as InvalidRequest, any other OSError as RlhfError. Other errors pass unchanged."""
    try:
        yield
    except PeerRankFailed as error:
        raise PeerFailed(str(error)) from error
    except (GenerationStopped, InferenceStopped) as error:
        raise CallCancelled(str(error)) from error
    except EngineOffloaded as error:
        raise Refused(str(error)) from error
    except (ValueError, FileNotFoundError) as error:
        raise InvalidRequest(str(error)) from error
    except OSError as error:
        raise RlhfError(f"{error.strerror}: {error.filename}" if error.filename else str(error)) from error
