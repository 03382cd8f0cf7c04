"""Setting: model, recipe, hardware and runtime of a run, fixed before any cost."""

from __future__ import annotations

from dataclasses import dataclass

from hwprofiles.profile import Cluster
from planner.runtime import Runtime
from planner.specs import ModelSpec, TrainSpec

HOST_LINK_FRACTION = 0.84  # nvbandwidth on H100, device to host: 52.8 of 63 GB/s


@dataclass(frozen=True, slots=True)
class Setting:
    """Model, recipe, hardware and runtime: what every formula needs to know, fixed for a run."""

    model: ModelSpec
    train: TrainSpec
    cluster: Cluster
    runtime: Runtime
    num_gpus: int
    overlap: str = "runtime"
    kernel: str = "unfused"

    @property
    def element_bytes(self) -> float:
        return 4.0 if self.train.precision == "fp32" else 2.0

    @property
    def gpus_on_node(self) -> int:
        """GPUs of the job on one node, which share its host memory."""
        return min(self.cluster.gpus_per_node, self.num_gpus)

    @property
    def host_link_bytes_per_s(self) -> float:
        """What a long copy to host memory reaches per GPU and direction, all GPUs copying."""
        cluster = self.cluster
        share = cluster.device.host_link_bytes_per_s / cluster.gpus_per_host_link
        return HOST_LINK_FRACTION * share

    @property
    def flash(self) -> bool:
        return self.kernel != "unfused"

    def gemm_precision(self, wanted: str) -> str:
        """Precision of a product: router and head stay out of fp8 and fp4."""
        name = self.train.precision
        if wanted and name in ("fp8", "fp4"):
            return "bf16"
        return name
