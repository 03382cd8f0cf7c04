"""Rules about the model and the sequence: heads, widths, sequence length, low-precision shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import CP_KINDS, RECOMPUTE, Layout
from planner.legality_rules import (
    FP8_MULTIPLE,
    RING,
    ULYSSES,
    Refusal,
    Situation,
    _all,
    choices,
    listed,
    nearest,
)
from planner.specs import AttentionSpec


def _same_gpus(layout: Layout, legal: list[int], s: Situation) -> str:
    """Offer the largest smaller tp on the same GPUs."""
    world, rest = s.num_gpus or layout.num_gpus, layout.pp * layout.cp
    for tp in sorted((v for v in legal if v < layout.tp), reverse=True):
        if world % (tp * rest) == 0:
            return f"; tp={tp} with dp={world // (tp * rest)} uses the same {world} GPUs"
    return ""


def heads_allowed(table: Layout, s: Situation) -> Any:
    return _all(heads % np.asarray(table.tp) == 0 for _, heads in s.heads)


def heads_refuse(layout: Layout, s: Situation) -> Refusal:
    part, heads = next((p, h) for p, h in s.heads if h % layout.tp)
    candidates = range(1, max(h for _, h in s.heads) + 1)
    legal = choices(heads_allowed, layout, s, "tp", candidates)
    kv_legal = [v for v in legal if bool(np.all(kv_allowed(layout.with_(tp=v), s)))]
    kv = sorted({a.num_key_value_heads for _, a in s.attentions})
    text = (
        f"tp={layout.tp} does not divide {part}num_attention_heads={heads}, and a head is never "
        f"split over ranks; legal here: {listed(legal, layout.tp)}"
    )
    if kv_legal != legal:
        text += f" (of these the {listed(kv)} key-value heads leave {listed(kv_legal, layout.tp)})"
    text += _same_gpus(layout, kv_legal, s)
    return Refusal(text + ".", {"tp": layout.tp, "num_attention_heads": heads}, {"tp": kv_legal})


def _kv_fits(attention: AttentionSpec, tp: Any, replicate: bool) -> Any:
    kv = attention.num_key_value_heads
    if attention.kind == "mla":  # keys and values are rebuilt per head from the latent
        return np.True_
    fits = kv % tp == 0
    return fits | (tp % kv == 0) if replicate and attention.kind == "gqa" else fits


def kv_allowed(table: Layout, s: Situation) -> Any:
    tp = np.asarray(table.tp)
    return _all(_kv_fits(a, tp, s.runtime.kv_replication) for _, a in s.attentions)


def kv_refuse(layout: Layout, s: Situation) -> Refusal:
    replicate = s.runtime.kv_replication
    part, a = next((p, a) for p, a in s.attentions if not _kv_fits(a, layout.tp, replicate))
    candidates = range(1, max(h for _, h in s.heads) + 1)
    both = choices(lambda t, s: kv_allowed(t, s) & heads_allowed(t, s), layout, s, "tp", candidates)
    how = (
        "one must divide the other"
        if replicate and a.kind == "gqa"
        else f"runtime {s.runtime.name} splits key-value heads and does not replicate them, "
        "so tp must divide them"
    )
    text = (
        f"tp={layout.tp} does not fit {part}num_key_value_heads={a.num_key_value_heads}: {how}; "
        f"legal here: {listed(both, layout.tp)}{_same_gpus(layout, both, s)}."
    )
    values = {"tp": layout.tp, "num_key_value_heads": a.num_key_value_heads}
    return Refusal(text, values, {"tp": both})


def widths_allowed(table: Layout, s: Situation) -> Any:
    return _all(width % np.asarray(table.tp) == 0 for width in s.mlp_widths)


def widths_refuse(layout: Layout, s: Situation) -> Refusal:
    width = next(w for w in s.mlp_widths if w % layout.tp)
    candidates = range(1, max(h for _, h in s.heads) + 1) if s.heads else range(1, 129)
    legal = choices(
        lambda t, s: widths_allowed(t, s) & heads_allowed(t, s) & kv_allowed(t, s),
        layout,
        s,
        "tp",
        candidates,
    )
    text = (
        f"tp={layout.tp} does not divide the MLP width intermediate_size={width}; "
        f"legal here: {listed(legal, layout.tp)}{_same_gpus(layout, legal, s)}."
    )
    return Refusal(text, {"tp": layout.tp, "intermediate_size": width}, {"tp": legal})


def sequence_allowed(table: Layout, s: Situation) -> Any:
    return s.train.seq_len % np.asarray(s.seq_multiple(table)) == 0


def sequence_refuse(layout: Layout, s: Situation) -> Refusal:
    multiple = int(s.seq_multiple(layout))
    seq_len = s.train.seq_len
    below, above = seq_len // multiple * multiple, -(-seq_len // multiple) * multiple
    legal = [v for v in (below, above) if v > 0]
    why = []
    if layout.cp > 1:
        kind = CP_KINDS[layout.cp_kind]
        halves = "" if layout.cp_kind == ULYSSES else ", which takes two pieces a rank"
        why.append(f"cp={layout.cp} with {kind}{halves}")
    if s.runtime.sequence_parallel and layout.tp > 1:
        why.append(f"tp={layout.tp} with sequence parallelism")
    text = (
        f"seq_len={seq_len} is not a multiple of {multiple}, as {' and '.join(why)} needs; nearest "
        f"legal: {listed(legal)} (pad {seq_len} to {above})."
    )
    values = {"seq_len": seq_len, "cp": layout.cp, "tp": layout.tp, "multiple": multiple}
    return Refusal(text, values, {"seq_len": legal})


def context_allowed(table: Layout, s: Situation) -> Any:
    cp, kind = np.asarray(table.cp), np.asarray(table.cp_kind)
    offered = np.isin(kind, [CP_KINDS.index(k) for k in s.runtime.cp_kinds])
    mask = (cp == 1) | offered
    if s.has_windows and not s.runtime.ring_window:
        mask = mask & ((cp == 1) | (kind != RING))
    return mask


def context_refuse(layout: Layout, s: Situation) -> Refusal:
    kind = CP_KINDS[layout.cp_kind]
    legal = [
        name
        for code, name in enumerate(CP_KINDS)
        if bool(np.all(context_allowed(layout.with_(cp_kind=code), s)))
    ]
    values = {"cp": layout.cp, "cp_kind": kind}
    if kind not in s.runtime.cp_kinds:
        why = f"runtime {s.runtime.name} does not offer it"
    else:
        why = f"ring attention of runtime {s.runtime.name} has no sliding windows"
    ends = f"legal here: {', '.join(legal)}" if legal else "legal here: cp=1 alone"
    text = f"cp={layout.cp} with cp_kind={kind} is not legal: {why}; {ends}."
    return Refusal(text, values, {"cp_kind": legal} if legal else {"cp": [1]})


def _ulysses_heads(degree: Any, s: Situation) -> Any:
    return _all(a.num_attention_heads % degree == 0 for part, a in s.attentions if not part)


def _ulysses_kv(degree: Any, s: Situation) -> Any:
    replicate = s.runtime.ulysses_kv_replication
    return _all(_kv_fits(a, degree, replicate) for part, a in s.attentions if not part)


def ulysses_allowed(table: Layout, s: Situation) -> Any:
    degree = np.asarray(table.tp) * np.asarray(table.cp)
    used = (np.asarray(table.cp) > 1) & (np.asarray(table.cp_kind) == ULYSSES)
    return ~used | (_ulysses_heads(degree, s) & _ulysses_kv(degree, s))


def ulysses_refuse(layout: Layout, s: Situation) -> Refusal:
    heads = [a.num_attention_heads for part, a in s.attentions if not part]
    kv = sorted({a.num_key_value_heads for part, a in s.attentions if not part})
    by_heads = [
        v
        for v in range(1, max(heads) // layout.tp + 1)
        if bool(np.all(_ulysses_heads(layout.tp * v, s)))
    ]
    legal = [v for v in by_heads if bool(np.all(_ulysses_kv(layout.tp * v, s)))]
    rule = (
        "cp must divide the query heads, and of cp and the key-value heads one the other"
        if s.runtime.ulysses_kv_replication
        else "cp must divide the query and the key-value heads"
    )
    share = f" after tp={layout.tp}" if layout.tp > 1 else ""
    text = (
        f"Ulysses with cp={layout.cp} does not fit {listed(sorted(set(heads)))} query and "
        f"{listed(kv)} key-value heads{share}: {rule}; the query heads allow "
        f"{listed(by_heads, layout.cp)}; legal here: {listed(legal, layout.cp)}."
    )
    values = {"cp": layout.cp, "tp": layout.tp, "num_attention_heads": heads[0]}
    return Refusal(text, values | {"num_key_value_heads": kv[0]}, {"cp": legal})


def _low_precision_shapes(table: Layout, s: Situation) -> list[tuple[str, Any]]:
    tokens = np.asarray(table.micro_batch * s.train.seq_len) / table.cp
    shapes: list[tuple[str, Any]] = [
        ("micro_batch x seq_len / cp", tokens),
        ("hidden_size", np.asarray(s.model.hidden_size)),
    ]
    shapes += [
        ("heads x head_dim / tp", np.asarray(a.num_attention_heads * a.v_dim) / table.tp)
        for part, a in s.attentions
        if not part
    ]
    shapes += [("intermediate_size / tp", np.asarray(w) / table.tp) for w in s.mlp_widths]
    shapes += [("expert width / etp", m.intermediate_size / np.asarray(table.etp)) for m in s.moes]
    return shapes


def low_precision_allowed(table: Layout, s: Situation) -> Any:
    if s.train.precision not in ("fp8", "fp4"):
        return np.True_
    return _all(size % FP8_MULTIPLE == 0 for _, size in _low_precision_shapes(table, s))


def low_precision_refuse(layout: Layout, s: Situation) -> Refusal:
    name, size = next(
        (n, float(v)) for n, v in _low_precision_shapes(layout, s) if v % FP8_MULTIPLE
    )
    padded = int(-(-size // FP8_MULTIPLE) * FP8_MULTIPLE)
    legal: dict[str, Any] = {name: [padded]}
    hint = f"pad it to {padded}"
    if name.startswith("micro_batch"):
        step = FP8_MULTIPLE * layout.cp
        seq_len = -(-s.train.seq_len // step) * step
        legal, hint = {"seq_len": [seq_len]}, f"pad it to {padded}, as seq_len={seq_len} does"
    text = (
        f"{name} = {size:g} is not a multiple of {FP8_MULTIPLE}, which {s.train.precision} matrix "
        f"products need; {hint}, or train in bf16."
    )
    values = {"precision": s.train.precision, name: size, "tp": layout.tp, "cp": layout.cp}
    return Refusal(text, values, legal)


def recompute_allowed(table: Layout, s: Situation) -> Any:
    code = np.asarray(table.recompute)
    mask = np.isin(code, [RECOMPUTE.index(name) for name in s.runtime.recompute])
    if s.cluster.host_memory_bytes_per_s <= 0:
        mask = mask & (code != RECOMPUTE.index("offload"))
    return mask & ~_overlap_conflict(table, s)


def _overlap_conflict(table: Layout, s: Situation) -> Any:
    """Recomputing a whole MoE layer would dispatch again inside the overlapped exchange."""
    if s.runtime.ep_overlap_fraction == 0:
        return np.False_
    bad = ["full"] + (["selective"] if "moe" in s.runtime.selective_modules else [])
    codes = [RECOMPUTE.index(name) for name in bad]
    return (np.asarray(table.ep) > 1) & np.isin(np.asarray(table.recompute), codes)


def recompute_refuse(layout: Layout, s: Situation) -> Refusal:
    name = RECOMPUTE[layout.recompute]
    legal = [
        word
        for code, word in enumerate(RECOMPUTE)
        if bool(np.all(recompute_allowed(layout.with_(recompute=code), s)))
    ]
    if name == "offload" and s.cluster.host_memory_bytes_per_s <= 0:
        why = f"{s.cluster.name} states no host memory bandwidth to offload to"
    elif name not in s.runtime.recompute:
        why = f"runtime {s.runtime.name} does not offer it"
    else:
        why = (
            f"it runs whole MoE layers again, dispatch included, while the exchange of "
            f"ep={layout.ep} is overlapped, which runtime {s.runtime.name} refuses"
        )
    text = f"recompute={name} is not legal: {why}; legal here: {', '.join(nearest(legal))}."
    return Refusal(text, {"recompute": name, "ep": layout.ep}, {"recompute": legal})
