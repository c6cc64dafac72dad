"""A process that fetches a batch from the peer of the transport suite, and is killed during or after the fetch.

Usage: `python -m contract.transport_reader DEVICES TRANSPORT BATCH SECONDS`: DEVICES as for the peer, BATCH the message
of the batch in hexadecimal digits.
"""

import sys
import time

from contract.fake_gpus import fake_gpus
from contract.host_devices import HostCuda, HostNccl
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.wire import from_proto
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
from nccl_transfer.transports.gpu.nccl import NcclReader
from rlhf.v1 import common_pb2

_, devices, name, batch, within_s = sys.argv
if devices == "gpu":
    transport = create_readers([name], on_gpu=True)[0]
elif devices == "fake":
    nccl, cuda = fake_gpus(name)
    transport = CudaIpcReader(cuda) if name == "cuda_ipc" else NcclReader(nccl, cuda)
elif name == "cuda_ipc":
    transport = CudaIpcReader(HostCuda("GPU-of-the-peer"))
else:
    transport = NcclReader(HostNccl(), HostCuda("GPU-of-the-reader"))
message = common_pb2.Batch.FromString(bytes.fromhex(batch))
Fetcher(host_id(), [transport]).fetch(from_proto(message), time.monotonic() + float(within_s))
print("fetched", flush=True)
time.sleep(60)
