"""What is legal but should be said: slow links, bubbles, uneven stages, padding, fp32."""

from __future__ import annotations

from planner.layout import Layout
from planner.legality_pipeline import suggest_chunks
from planner.legality_rules import Situation, listed

ACHIEVED_COMPUTE_FRACTION = 0.5  # of the peak, in the rough test for network-bound ZeRO-3
FLOPS_PER_PARAM_AND_TOKEN = 6  # forward and backward


def padded_vocab_size(vocab_size: int, multiple: int, tp: int) -> int:
    """Vocabulary rounded up to a whole number of `multiple` rows on each of `tp` ranks.

    Examples
    --------
    >>> padded_vocab_size(50257, 128, 1), padded_vocab_size(151552, 1, 6)
    (50304, 151554)
    """
    unit = multiple * tp
    return -(-vocab_size // unit) * unit


def warnings_for(layout: Layout, s: Situation) -> list[str]:
    """Say what a person should know about a legal layout."""
    found: list[str] = []
    if s.train.precision == "fp32":
        found.append(
            "Precision is fp32: matrix products run without bf16 tensor cores, at a fraction of "
            "the speed and twice the activation memory; set precision bf16 unless fp32 is meant."
        )
    found += _slow_links(layout, s)
    found += _pipeline(layout, s)
    if layout.ep > 1 and layout.tp > 1 and not s.runtime.sequence_parallel:
        found.append(
            f"ep={layout.ep} with tp={layout.tp} and no sequence parallelism: every "
            "tensor-parallel rank sends the same tokens to the experts."
        )
    found += _replicated_heads(layout, s)
    return found


def statements(layout: Layout, s: Situation) -> list[str]:
    """Say what the layout means in numbers: batch, stages, padding."""
    count = s.train.global_batch_size // (layout.micro_batch * layout.dp)
    batch = (
        f"Global batch {s.train.global_batch_size} = micro_batch {layout.micro_batch} x "
        f"dp {layout.dp} x {count} micro-batches."
    )
    lines = [batch]
    vocab = s.model.vocab_size
    padded = padded_vocab_size(vocab, s.runtime.vocab_multiple, layout.tp)
    if padded != vocab:
        lines.append(
            f"Vocabulary {vocab} is padded to {padded}, a multiple of {s.runtime.vocab_multiple} x "
            f"tp={layout.tp}, in embedding and head alike; the {padded - vocab} added rows are "
            "counted in memory and must be stripped from a saved checkpoint."
        )
    if layout.pp > 1:
        split = s.stage_layers or suggest_chunks(s.model.num_hidden_layers, layout)
        lines.append(f"Layers of the {len(split)} stages: {listed(split, most=999)}.")
    return lines


def _leaves_domain(size: int, s: Situation, gpus: int) -> bool:
    """Say whether a group of `size` neighbouring ranks does not fit in one scale-up domain."""
    domain = s.cluster.domain_gpus
    return size > 1 and gpus > domain and (size > domain or domain % size != 0)


def _slow_links(layout: Layout, s: Situation) -> list[str]:
    gpus, domain = layout.num_gpus, s.cluster.domain_gpus
    found = []
    if _leaves_domain(layout.tp, s, gpus):
        found.append(
            f"tp={layout.tp} leaves the scale-up domain of {domain} GPUs: tensor-parallel traffic "
            f"of every layer crosses the {s.cluster.scale_out.name} network."
        )
    if layout.ep > 1 and _leaves_domain(layout.ep * layout.etp, s, gpus):
        inside = [v for v in range(1, layout.ep) if layout.ep % v == 0 and v * layout.etp <= domain]
        text = (
            f"ep={layout.ep} x etp={layout.etp} leaves the scale-up domain of {domain} GPUs: the "
            f"all-to-all crosses the {s.cluster.scale_out.name} network"
        )
        if inside:
            text += f"; ep={max(inside)} keeps it inside"
        found.append(text + ".")
        if _is_efa(s):
            found.append(
                "The network is EFA: DeepEP kernels do not run there, so experts across nodes use "
                "the NCCL all-to-all."
            )
    found += _network_bound_zero3(layout, s)
    return found


def _is_efa(s: Situation) -> bool:
    names = (s.cluster.scale_out.name, *s.cluster.transports)
    return any(name.lower().startswith("efa") for name in names)


def _network_bound_zero3(layout: Layout, s: Situation) -> list[str]:
    """Compare gathering and reducing a parameter with computing on it, per micro-batch.

    Per parameter of a node's replicas: 2 g + r bytes over the node's network against 6 T / (t peak)
    seconds of compute; parameters cancel. g and r are the runtime's gather and reduce sizes.
    """
    sharded_over = layout.shard * layout.tp
    if layout.zero != 3 or sharded_over <= s.cluster.domain_gpus:
        return []
    peaks = s.cluster.device.peak_flops_per_s
    peak = peaks.get(s.train.precision) or max(peaks.values(), default=0.0)
    nodes = s.cluster.domain_gpus / s.cluster.gpus_per_node
    bandwidth = s.cluster.node_scale_out_bytes_per_s * nodes
    if not peak or not bandwidth:
        return []
    traffic_s = (2 * s.runtime.gather_bytes + s.runtime.reduce_bytes) / bandwidth
    tokens = layout.micro_batch * s.train.seq_len / layout.cp
    flops_per_s = ACHIEVED_COMPUTE_FRACTION * peak * layout.tp
    compute_s = FLOPS_PER_PARAM_AND_TOKEN * tokens / flops_per_s
    if traffic_s <= compute_s:
        return []
    needed = bandwidth * traffic_s / compute_s
    text = (
        f"zero=3 over {layout.shard} ranks is bound by the network: a node has "
        f"{bandwidth / 1e9:.0f} GB/s and hiding the traffic of {tokens:.0f} tokens a GPU needs "
        f"about {needed / 1e9:.0f} GB/s; a larger micro_batch, a shard inside the node or tp with "
        "pp needs less."
    )
    return [text]


def _pipeline(layout: Layout, s: Situation) -> list[str]:
    if layout.pp == 1:
        return []
    found = []
    count = s.train.global_batch_size // (layout.micro_batch * layout.dp)
    if count < layout.pp:
        bubble = (layout.pp - 1) / (count + layout.pp - 1)
        found.append(
            f"{count} micro-batches are fewer than the pp={layout.pp} stages: at least "
            f"{100 * bubble:.0f} % of the time is bubble, and some runtimes hang; "
            f"{layout.pp} or more micro-batches are needed to fill the pipeline."
        )
    layers, chunks = s.model.num_hidden_layers, layout.pp * layout.vpp
    if layers % chunks and s.stage_layers is None:
        found.append(
            f"{layers} layers do not divide by pp={layout.pp} x vpp={layout.vpp}: stages hold "
            f"{listed(suggest_chunks(layers, layout), most=999)} layers, so the launch must state "
            "first and last stage counts or a layout; none is dropped."
        )
    return found


def _replicated_heads(layout: Layout, s: Situation) -> list[str]:
    fewer = sorted(
        {
            a.num_key_value_heads
            for _, a in s.attentions
            if a.kind == "gqa" and a.num_key_value_heads < layout.tp
        }
    )
    return [
        f"tp={layout.tp} is more than {heads} key-value heads: each is held by "
        f"{layout.tp // heads} ranks, a plain column split would be wrong."
        for heads in fewer
    ]
