"""Calls to all ranks of a service: which rank an error names, and what it says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from client import fanout
from client.fanout import FanOut
from client.rank import WORKER
from rlhf.errors import DeadlineExceeded, PeerFailed
from rlhf.v1 import worker_pb2


class Silent:
    """Stands for the client of a rank that answers neither calls nor Cancel."""

    service = "actor"

    def __str__(self) -> str:
        return "actor rank 1"

    def start(self, method: Any, request: bytes, timeout_s: float) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        late = DeadlineExceeded(f"{self} {method.name}: no answer")
        asyncio.get_running_loop().call_later(timeout_s, lambda: answer.done() or answer.set_exception(late))
        return answer

    async def call(self, method: Any, request: Any, timeout_s: float) -> Any:
        raise DeadlineExceeded("Cancel: no answer")


class Failed(Silent):
    """Stands for the client of a rank whose peer has left a collective."""

    def start(self, method: Any, request: bytes, timeout_s: float) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(PeerFailed("actor rank 0: a peer has left"))
        return answer

    async def call(self, method: Any, request: Any, timeout_s: float) -> Any:
        return worker_pb2.CancelResponse()


@pytest.mark.parametrize(
    ("first", "timeout_s", "text"),
    [
        (Failed(), 60.0, "actor rank 1 Synchronize: no answer, and none to Cancel: "),
        (Silent(), 0.05, "actor rank 1 Synchronize: no answer within 0.05 s, and none to Cancel: "),
    ],
)
def test_an_error_names_the_timeout_of_a_call_where_that_has_passed_alone(
    first: Silent, timeout_s: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "SETTLE_S", 0.05)
    clients: Any = [first, Silent()]

    async def call() -> None:
        ranks = FanOut(clients, 1)
        await ranks.send(WORKER["Synchronize"], "id", [b"", b""], timeout_s, lambda: None)

    with pytest.raises(DeadlineExceeded, match=text) as raised:
        asyncio.run(asyncio.wait_for(call(), 20))
    assert raised.value.called == "actor"
