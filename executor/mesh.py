"""Meshes: the process groups of a plan, from its layout alone.

Ranks are numbered as in `planner.mesh`: tp fastest, then cp, dp, pp. Three views fold them:

- dense parameters: ``pp, replicate, shard, tp``, where ``replicate x shard`` is dp x cp joined;
- attention: ``cp``, a factor of that joined axis;
- experts: ``pp, edp_replicate, edp_shard, ep``, folded over dp, cp and tp.

An axis of one rank has neither mesh nor group, but for ``shard``, which FSDP wants even then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.errors import LayoutError
from planner.layout import Layout
from planner.plan import Plan

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
TIED = "tied"  # first and last stage of a pipeline, where both hold the embedding's weight
AXES = ("pp", "dp", "cp", "tp", "replicate", "shard", "ep", "edp", "edp_replicate", "edp_shard")


@dataclass
class Meshes:
    """Process groups of one plan as this rank sees them.

    `world` holds the dense parameters, `expert` those of routed experts (None where they follow the
    dense axes). `size`, `rank`, `mesh` and `group` take an axis name of `AXES`.
    """

    layout: Layout
    global_rank: int
    device_type: str
    world: DeviceMesh
    expert: DeviceMesh | None = None
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Ranks on an axis."""
        return axis_sizes(self.layout)[axis]

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Coordinates of a rank (this one, unless said) on every axis."""
        return coordinates(self.layout, self.global_rank if rank is None else rank)

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.coordinates()[axis]

    def mesh(self, axis: str) -> DeviceMesh | None:
        """One-dimensional mesh of an axis, None where it has one rank or no mesh of its own."""
        for mesh in (self.world, self.expert):
            if mesh is not None and axis in (mesh.mesh_dim_names or ()):
                return mesh[axis]
        return None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Process group of an axis, None where it has one rank."""
        if axis in self.groups:
            return self.groups[axis]
        mesh = self.mesh(axis)
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()

    @property
    def pp(self) -> DeviceMesh | None:
        return self.mesh("pp")

    @property
    def tp(self) -> DeviceMesh | None:
        return self.mesh("tp")

    @property
    def ep(self) -> DeviceMesh | None:
        return self.mesh("ep")

    @property
    def fsdp(self) -> DeviceMesh:
        """Where dense parameters shard: one dimension, or two with the replicas first."""
        names = tuple(n for n in ("replicate", "shard") if n in (self.world.mesh_dim_names or ()))
        return self.world[names]

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """As `fsdp` for routed experts; None where they follow the dense axes."""
        if self.expert is None:
            return None
        names = self.expert.mesh_dim_names or ()
        return self.expert[tuple(n for n in ("edp_replicate", "edp_shard") if n in names)]


def axis_sizes(layout: Layout) -> dict[str, int]:
    """Ranks on every axis of a layout.

    >>> sizes = axis_sizes(Layout(dp=4, tp=2, ep=4, zero=3, shard=2))
    >>> [sizes[axis] for axis in ("replicate", "shard", "edp", "edp_replicate", "edp_shard")]
    [2, 2, 2, 2, 1]
    """
    joined = layout.dp * layout.cp
    edp = layout.edp
    edp_shard = max(1, edp * layout.shard // joined)
    return {
        "pp": layout.pp,
        "dp": layout.dp,
        "cp": layout.cp,
        "tp": layout.tp,
        "replicate": joined // layout.shard,
        "shard": layout.shard,
        "ep": layout.ep,
        "edp": edp,
        "edp_replicate": edp // edp_shard,
        "edp_shard": edp_shard,
    }


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Coordinates of a rank on every axis.

    >>> [coordinates(Layout(dp=2, tp=2, cp=2), 5)[axis] for axis in ("tp", "cp", "dp", "pp")]
    [1, 0, 1, 0]
    """
    sizes = axis_sizes(layout)
    per_stage = layout.dp * layout.cp * layout.tp
    inner = rank % per_stage
    joined = inner // layout.tp
    expert = inner // layout.ep
    return {
        "pp": rank // per_stage,
        "dp": joined // layout.cp,
        "cp": joined % layout.cp,
        "tp": inner % layout.tp,
        "replicate": joined // sizes["shard"],
        "shard": joined % sizes["shard"],
        "ep": inner % layout.ep,
        "edp": expert,
        "edp_replicate": expert // sizes["edp_shard"],
        "edp_shard": expert % sizes["edp_shard"],
    }


def build_mesh(plan: Plan, device_type: str) -> Meshes:
    """Create every process group that the plan needs; all ranks must call it.

    Raises
    ------
    LayoutError
        The world has another size than the plan, or experts would be split over tensor ranks.
    """
    layout = plan.layout
    if dist.get_world_size() != plan.num_gpus:
        raise LayoutError(
            f"the plan is for {plan.num_gpus} ranks and {dist.get_world_size()} were started; "
            f"start {plan.num_gpus}, or plan again",
            values={"world_size": dist.get_world_size()},
            legal={"world_size": [plan.num_gpus]},
        )
    if layout.etp > 1:
        raise LayoutError(
            f"etp={layout.etp} is not offered: experts are not split over tensor ranks; legal: 1",
            values={"etp": layout.etp},
            legal={"etp": [1]},
        )
    sizes = axis_sizes(layout)
    world = named_mesh(device_type, sizes, ("pp", "replicate", "shard", "tp"), keep=("shard",))
    expert = None
    if plan.model.is_moe and (layout.ep > 1 or layout.tp > 1):
        axes = ("pp", "edp_replicate", "edp_shard", "ep")
        expert = named_mesh(device_type, sizes, axes, keep=("edp_shard",))
    meshes = Meshes(layout, dist.get_rank(), device_type, world, expert)
    # Axes that are not one dimension of a mesh: cp, which sharding may cut, and joined axes.
    for axis in wanted_groups(plan):
        group = subgroup(layout, axis, plan.num_gpus)
        if group is not None:
            meshes.groups[axis] = group
    if plan.model.tie_word_embeddings and layout.pp > 1:
        per_stage = plan.num_gpus // layout.pp
        for first in range(per_stage):
            ends = [first, first + plan.num_gpus - per_stage]
            group = dist.new_group(ends)
            if dist.get_rank() in ends:
                meshes.groups[TIED] = group
    return meshes


def wanted_groups(plan: Plan) -> list[str]:
    """Axes that need a group beside those of the meshes."""
    layout = plan.layout
    found = ["cp"] if layout.cp > 1 else []
    if plan.model.is_moe and (layout.ep > 1 or layout.tp > 1):
        found.append("edp")
    return found


def named_mesh(
    device_type: str, sizes: dict[str, int], axes: tuple[str, ...], keep: tuple[str, ...]
) -> DeviceMesh:
    """A mesh of the axes that have more than one rank, and of those to `keep`."""
    kept = tuple(axis for axis in axes if sizes[axis] > 1 or axis in keep)
    return init_device_mesh(device_type, tuple(sizes[axis] for axis in kept), mesh_dim_names=kept)


def subgroup(layout: Layout, axis: str, world_size: int) -> dist.ProcessGroup | None:
    """The group of ranks that differ from this one on `axis` alone, of the axis' own grid."""
    if axis_sizes(layout)[axis] == 1:
        return None
    members: dict[tuple[int, ...], list[int]] = {}
    others = {"cp": ("pp", "dp", "tp"), "dp": ("pp", "cp", "tp"), "edp": ("pp", "ep")}[axis]
    for rank in range(world_size):
        at = coordinates(layout, rank)
        members.setdefault(tuple(at[name] for name in others), []).append(rank)
    mine = None
    for ranks in members.values():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
