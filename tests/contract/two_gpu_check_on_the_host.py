"""`nccl_transfer.testing.two_gpu_check` on GPUs made of the host, whole or with something wrong.

Started as `python -m contract.two_gpu_check_on_the_host [FAULT]`: `wrong bytes` arrive; the source has `no start`;
the source `hangs` at its start; failures are told `too late` while it is stopped; or the GPU has an error of its own,
`foreign`.
"""

import os
import sys
import time

from contract.host_devices import HostCuda, HostNccl
from nccl_transfer.testing import two_gpu_check

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class WrongBytes(HostCuda):
    def copy_out(self, data, pointer):
        super().copy_out(data, pointer)
        if len(data) == 4096:
            data[0] ^= 1


class Broken(HostCuda):
    def copy_out(self, data, pointer):
        raise RuntimeError("an illegal memory access was encountered")


class TooLate(two_gpu_check.Check):
    def _stop(self):
        super()._stop()
        two_gpu_check.LATE_S = -60


def devices(number):
    if FAULT == "no start" and number == 1:
        sys.exit(3)
    if FAULT == "hangs" and number == 1:
        time.sleep(60)
    cuda = {"wrong bytes": WrongBytes, "foreign": Broken}.get(FAULT, HostCuda)
    return HostNccl(), cuda(f"GPU-{number}")


if __name__ == "__main__":
    two_gpu_check.FAILING_S = 1.0
    if FAULT == "hangs":
        two_gpu_check.TIMEOUT_S = 1.0
    if FAULT == "too late":
        two_gpu_check.Check = TooLate
    os._exit(two_gpu_check.main(devices, (1, 4096, 1 << 20, 4 << 20)))
