"""Runtime: what a training framework can do and how it behaves, as facts.

A runtime is a file in `planner/runtimes/`; its fields are facts with unit, kind and source, like
those of hardware. Formulas read these fields and never branch on a runtime's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from hwprofiles.profile import Fact

RUNTIME_DIR = Path(__file__).parent / "runtimes"


@dataclass(frozen=True, slots=True)
class Runtime:
    """Behaviour of one training framework.

    Capabilities
    ------------
    zero_stages, schedules, recompute, cp_kinds, offloads, precisions, optimizers
        What it offers, names as in `planner.layout` and `planner.specs`.
    zero_with_pp
        ZeRO stages that may be combined with pp > 1.
    hsdp
        Whether one sharded copy may span part of the data-parallel ranks.
    sequence_parallel
        Tensor parallelism also splits norms and residual stream over the sequence.
    scattered_sends
        Without sequence parallelism, each tensor-parallel rank sends 1/tp of a stage's output, and
        the receivers gather it.
    kv_replication
        tp may exceed num_key_value_heads (one must divide the other).
    expert_tp
        Experts may be split over their own tensor-parallel degree.
    uneven_stages
        Pipeline ranks may hold different numbers of layers.
    interleaved_multiple
        Interleaved schedules need micro-batches in whole multiples of pp.
    vocab_multiple
        Vocabulary is padded to a multiple of this times tp.
    ulysses_kv_replication
        Ulysses may use more ranks than key-value heads (one must divide the other).
    ring_window
        Ring attention works with sliding-window layers.
    pads_products
        Operands whose widths are no multiple of 16 bytes are padded before a product, as compiled
        PyTorch does (inductor's `shape_padding`); eager PyTorch does not.
    microbatches_at_least_pp
        Schedules that refuse fewer micro-batches than pipeline stages.
    split_backward_zero
        ZeRO stages that may be combined with a schedule that splits the backward pass (zero-bubble,
        dualpipe) when there is more than one data-parallel rank.

    Memory, bytes per parameter unless said
    ---------------------------------------
    weight_bytes, grad_bytes, master_bytes
        Compute copy, accumulated gradient, fp32 master copy in mixed precision (0: the weights
        themselves are the master). Optimizer moments come from the optimizer.
    passing_grad_bytes
        Gradient that a micro-batch leaves beside the accumulated one until it is added and freed:
        it takes the place of the layer's activations, so the larger of the two counts. With more
        than one micro-batch in flight this is an upper bound.
    step_grad_bytes
        Extra copy of owned gradients while the optimizer steps.
    weight_shard_is_master
        ZeRO-3 (and FSDP with any reshard) keeps only the fp32 master shard; compute copies exist in
        the unsharded window alone.
    fp8_weight_copy_bytes
        Cached fp8 copies of GEMM weights beside the bf16 weight.
    fsdp_forward_units, fsdp_backward_weight_units, fsdp_backward_grad_bytes
        Unsharded layers alive at once, forward and backward, and bytes of gradient per parameter of
        one layer in flight.
    zero3_pp_keeps_stage
        With pp > 1 a stage's parameters stay unsharded through the step (weight_bytes +
        reduce_bytes more per stage parameter).
    bucket_elements
        Gradient bucket, elements; 0: one bucket a layer. Its bytes come on top of the gradients.
    context_bytes, comm_bytes_per_group, cublas_workspace_bytes
        Per process: CUDA context and kernels; NCCL buffers per communicator; GEMM workspace.
    allocator_fraction
        Reserved over allocated, minus one.
    logit_bytes_kept, logit_bytes_peak, logit_bytes_peak_tp
        Bytes per logit kept until its backward, at the peak, and at the peak of a loss over logits
        that tensor parallelism splits.

    Time
    ----
    reduce_bytes, gather_bytes
        Element size of gradient reduction and parameter gathering.
    reduce_op
        all_reduce or reduce_scatter when optimizer state is sharded (zero 1 and 2).
    reduce_every_microbatch
        ZeRO stages that reduce gradients in every micro-batch.
    overlap_grad_reduce, overlap_param_gather
        Share of that traffic that may hide behind compute.
    overlap_p2p
        Schedules whose pipeline sends hide behind compute.
    tp_overlap_fraction, cp_overlap_fraction, ep_overlap_fraction
        Share of that traffic hidden when compute is long enough.
    fp8_tp_gather_bytes
        Element size in which tensor-parallel gathers carry the inputs of fp8 products.
    overlap_contention, comm_sms
        Seconds that compute beside a collective inside a node is slowed, per second of the
        collective: they share SMs, memory bandwidth and power. `comm_sms` of the SMs are taken for
        as long as it runs; the rest of the contention goes with the bytes it moves.
    accumulate_bytes
        HBM bytes per local parameter and micro-batch that add gradients to the accumulated ones,
        where the weight-gradient product does not do it.
    gather_copy_bytes, reduce_copy_bytes
        HBM bytes per unsharded parameter that each gather and each reduction copy.
    pass_bytes
        Bytes moved per token and per unit of width by memory-bound operations, forward and
        backward: see `planner.flops.PASSES` for the names.
    kept_extra
        Bytes kept beyond fused kernels, per token and unit of width: ``gated`` (MLP width),
        ``norm`` (hidden), ``rotary`` (q and k width); ``gathered`` (hidden, not split by tp) per
        block.
    launches
        Kernels launched from the host: per layer forward and backward by part (``attention``,
        ``mlp``, ``moe``, ``tp``, ``recompute`` ...).
    blocking_launch_factor
        Host time of a launch that waits for its kernel (CUDA_LAUNCH_BLOCKING=1), in launches that
        do not wait; 0: launches do not wait.
    moe_drains
        Times per MoE layer and forward that the host waits for the device (split sizes of a
        dropless dispatch), so that the launch queue is empty.
    moe_drain_s
        Time that each such wait costs beyond the launches of its layer, forward and backward alike.
    route_bytes
        Bytes per routed token that go by an exchange of their own (probabilities); 0: none, and no
        exchange of counts.
    shared_expert_overlap
        Share of dispatch and combine that may hide beside the shared experts.
    attention_kernels
        Preferred attention kernel by device architecture.
    step_bytes_full, step_bytes_owned
        HBM traffic of the optimizer step per local and per owned parameter, without the moments.
    selective_modules
        What the policy ``selective`` recomputes: core_attention, norm, activation, moe_activation,
        mlp, moe, mla_up_projection, matmul_half (every second matmul).
    """

    name: str
    title: str
    zero_stages: tuple[int, ...]
    zero_with_pp: tuple[int, ...]
    schedules: tuple[str, ...]
    recompute: tuple[str, ...]
    selective_modules: tuple[str, ...]
    cp_kinds: tuple[str, ...]
    offloads: tuple[str, ...]
    precisions: tuple[str, ...]
    optimizers: tuple[str, ...]
    max_tp: int
    max_pp: int
    max_cp: int
    max_ep: int
    hsdp: bool
    sequence_parallel: bool
    scattered_sends: bool
    kv_replication: bool
    expert_tp: bool
    uneven_stages: bool
    interleaved_multiple: bool
    vocab_multiple: int
    weight_bytes: float
    grad_bytes: float
    master_bytes: float
    passing_grad_bytes: float
    step_grad_bytes: float
    weight_shard_is_master: bool
    fp8_weight_copy_bytes: float
    fsdp_forward_units: float
    fsdp_backward_weight_units: float
    fsdp_backward_grad_bytes: float
    zero3_pp_keeps_stage: bool
    bucket_elements: float
    context_bytes: float
    comm_bytes_per_group: float
    comm_base_bytes: float
    reduce_buffer_bytes: float
    cublas_workspace_bytes: float
    allocator_fraction: float
    logit_bytes_kept: float
    logit_bytes_peak: float
    logit_bytes_peak_tp: float
    reduce_bytes: float
    gather_bytes: float
    reduce_op: str
    reduce_every_microbatch: tuple[int, ...]
    overlap_grad_reduce: float
    overlap_param_gather: float
    overlap_p2p: tuple[str, ...]
    tp_overlap_fraction: float
    fp8_tp_gather_bytes: float
    cp_overlap_fraction: float
    ep_overlap_fraction: float
    overlap_contention: float
    comm_sms: float
    accumulate_bytes: float
    gather_copy_bytes: float
    reduce_copy_bytes: float
    moe_drains: float
    moe_drain_s: float
    route_bytes: float
    shared_expert_overlap: float
    step_bytes_full: float
    step_bytes_owned: float
    ulysses_kv_replication: bool = False
    ring_window: bool = False
    pads_products: bool = False
    microbatches_at_least_pp: tuple[str, ...] = ()
    split_backward_zero: tuple[int, ...] = (0, 1, 2, 3)
    blocking_launch_factor: float = 0.0
    pass_bytes: Mapping[str, float] = field(default_factory=dict)
    launches: Mapping[str, float] = field(default_factory=dict)
    kept_extra: Mapping[str, float] = field(default_factory=dict)
    attention_kernels: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)


@lru_cache
def load_runtime(name: str) -> Runtime:
    """Give the runtime called `name`, from its file in `planner/runtimes/`.

    Raises
    ------
    ProfileError
        Unknown name, unknown or missing field, a number without unit, kind or source.
    """
    from planner.runtimes.loader import read_runtime

    return read_runtime(RUNTIME_DIR / f"{name}.toml")
