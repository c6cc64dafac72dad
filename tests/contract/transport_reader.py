"""A process that fetches a batch from the peer of the transport suite, to be killed while it does or afterwards.

Started as `python transport_reader.py TRANSPORT BATCH SECONDS`, the batch as its message in hexadecimal digits.
"""

import sys
import time

from host_devices import HostCuda, HostNccl
from nccl_transfer.fetch import Fetcher
from nccl_transfer.transports import host_id
from nccl_transfer.transports.cuda_ipc import CudaIpcTransport
from nccl_transfer.transports.nccl import NcclTransport
from nccl_transfer.wire import from_proto
from rlhf.v1 import common_pb2

transport = (
    CudaIpcTransport(HostCuda("GPU-of-the-peer"))
    if sys.argv[1] == "cuda_ipc"
    else NcclTransport(HostNccl(), HostCuda("GPU-of-the-reader"))
)
message = common_pb2.Batch.FromString(bytes.fromhex(sys.argv[2]))
Fetcher(host_id(), [transport]).fetch(from_proto(message), time.monotonic() + float(sys.argv[3]))
print("fetched", flush=True)
time.sleep(60)
