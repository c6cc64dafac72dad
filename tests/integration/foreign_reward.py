"""A reward as somebody else would write one: plain gRPC and the contract, nothing more of the cluster.

`python foreign_reward.py PORT` says "ready" and serves until it is ended.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from rlhf.v1 import reward_pb2, reward_pb2_grpc


class DigitMean(reward_pb2_grpc.RewardServiceServicer):
    """The mean digit of a response, as `toy_rewards.digit_mean`."""

    def ComputeReward(self, request, context):
        scores = [
            sum(int(c) for c in row.response if c.isdigit()) / 9 / max(len(row.response), 1)
            for row in request.text_rows
        ]
        return reward_pb2.ComputeRewardResponse(scores=[reward_pb2.RowScore(score=score) for score in scores])


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(DigitMean(), server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    known = [name for name in ("torch", "nccl_transfer", "services", "controller") if name in sys.modules]
    print("ready" if not known else f"imported {known}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
