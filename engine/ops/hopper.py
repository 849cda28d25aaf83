"""What plans of products know of a device, and the Hopper cards to compile for ahead."""

from dataclasses import dataclass
from functools import cache

from engine.ops.skinny_gemm import SMEM_LIMITS, device_limits, is_hopper

HOPPER_SMS = (16, 32, 60, 64, 78, 114, 132)  # of its cards, and of parts of them (MIG)


@dataclass(frozen=True)
class Device:
    """Of any kind; `has_clusters` says whether it is Hopper's."""

    num_sms: int
    smem_limit: int  # bytes of a block
    has_clusters: bool

    def clusters_of(self, blocks: int) -> int:
        """How many clusters of so many blocks run at a time, a block on each SM. The SMs of a cluster are
        of one processing cluster, so some are left over: of an H200's 132, 12 (a test asks the driver)."""
        return self.num_sms // blocks if blocks <= 2 else self.num_sms * 10 // 11 // blocks


@cache
def device_of(index: int | None = None) -> Device:
    """A CUDA device (default: the current one); an H200 where there is none."""
    return Device(*device_limits(index), has_clusters=is_hopper(index))


def devices_of(arch: str | None) -> list[Device]:
    """Those to compile for: the current one, or all cards of `arch`; none of another architecture."""
    if arch is None:
        return [device_of()]
    if arch != "sm_90a":
        return []
    return [Device(num_sms, SMEM_LIMITS[arch], has_clusters=True) for num_sms in HOPPER_SMS]
