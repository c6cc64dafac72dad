"""Requests for traces are made with the token of class administer, which only ranks of this package are sent."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy import profiling
from deploy.profiling import request_traces
from rlhf.access import Access
from rlhf.channels import open_channel
from rlhf.errors import ConfigError
from rlhf.v1 import common_pb2, worker_pb2, worker_pb2_grpc


class Server(worker_pb2_grpc.WorkerServiceServicer):
    """A server with one rank.

    Attributes:
        address: Its address.
        epoch: Epoch that it tells; 0: it is no rank of this package.
    """

    address = ""
    epoch = 0

    def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        endpoint = common_pb2.Endpoint(address=self.address, epoch=self.epoch)
        return worker_pb2.DescribeResponse(epoch=self.epoch, ranks=[worker_pb2.RankInfo(endpoint=endpoint)])

    def Profile(self, request: Any, context: Any) -> worker_pb2.ProfileResponse:
        return worker_pb2.ProfileResponse(path=f"{request.directory}/trace")


@pytest.mark.parametrize("epoch", [7, 0])
def test_the_token_of_class_administer_goes_to_ranks_alone(
    epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Access] = []

    def opened(address: str, options: Any, access: Access) -> grpc.Channel:
        sent.append(access)
        return open_channel(address, options, access)

    monkeypatch.setattr(profiling, "open_channel", opened)
    serving, server = Server(), grpc.server(futures.ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(serving, server)
    serving.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    serving.epoch = epoch
    server.start()
    try:
        if epoch:
            found = request_traces("reward", serving.address, Path("/traces"), 1)
            assert found == [(serving.address, "/traces/trace")]
            assert sent == [Access.READ, Access.ADMINISTER]
        else:
            with pytest.raises(ConfigError, match=r"^services\.reward at .* is not of this package"):
                request_traces("reward", serving.address, Path("/traces"), 1)
            assert sent == [Access.READ]
    finally:
        server.stop(None).wait()
