"""What if a fact were another: a cluster with some facts replaced, and a digest of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hwprofiles.build import build_cluster, build_device, build_link
from hwprofiles.errors import ProfileError
from hwprofiles.facts import (
    CLUSTER_FACTS,
    DEVICE_FACTS,
    LEVEL_FACTS,
    LINK_FACTS,
    Spec,
    check_value,
    near,
)
from hwprofiles.profile import AttentionCurve, Cluster, CollectiveCurve, Fact, GemmCurve
from hwprofiles.units import dimension_of, to_si, units_of

_FACTOR = re.compile(r"\s*([0-9.eE+-]+)\s*[xX]\s*")
_AMOUNT = re.compile(r"\s*([0-9.eE+-]+)\s*([A-Za-z][A-Za-z/]*)?\s*")


def override_keys(cluster: Cluster) -> list[str]:
    """Every key that `override` takes for this cluster."""
    links = {link.name: link for link in (cluster.scale_up, cluster.scale_out)}
    return [
        *(f"device.{name}" for name in cluster.device.facts),
        *(f"link.{link.name}.{name}" for link in links.values() for name in link.facts),
        *(f"cluster.{name}" for name in cluster.facts),
    ]


def override(cluster: Cluster, changes: Mapping[str, str | float]) -> Cluster:
    """The cluster with facts replaced, for a what-if question.

    A key is ``device.<fact>``, ``link.<name>.<fact>``, ``scale_up.<fact>``, ``scale_out.<fact>`` or
    ``cluster.<fact>``; a value is a factor (``"0.5x"``) or an amount with its unit (``"141 GB"``;
    counts and fractions need no unit). Measured curves follow: a changed peak rate scales the
    curves of that precision, a changed scale-up link the part of the collective curves above
    their latency.

    >>> from hwprofiles.loader import load_cluster
    >>> slow = override(load_cluster("dgx-h100"), {"link.ib-ndr.bandwidth": "0.5x"})
    >>> slow.scale_out.bytes_per_s
    25000000000.0
    """
    device = dict(cluster.device.facts)
    up, out = dict(cluster.scale_up.facts), dict(cluster.scale_out.facts)
    own = dict(cluster.facts)
    for key, value in changes.items():
        kind, _, fact = key.partition(".")
        targets: list[tuple[dict[str, Fact], Spec]] = []
        if kind == "device":
            targets = [(device, DEVICE_FACTS)]
        elif kind in ("scale_up", "scale_out"):
            targets = [(up if kind == "scale_up" else out, LINK_FACTS)]
        elif kind == "link":
            name, _, fact = fact.rpartition(".")
            pairs = ((cluster.scale_up.name, up), (cluster.scale_out.name, out))
            targets = [(facts, LINK_FACTS) for link, facts in pairs if link == name]
        elif kind == "cluster":
            targets = [(own, CLUSTER_FACTS)]
        if not targets or not all(fact in facts for facts, _ in targets):
            legal = override_keys(cluster)
            raise ProfileError(
                f"{key[:80]!r} is no fact of cluster {cluster.name!r}; near facts: "
                f"{', '.join(near(key, legal)[:6])}",
                values={"fact": key[:80]},
                legal={"fact": legal},
            )
        for facts, spec in targets:
            name = fact.rsplit(".", 1)[-1]
            dimension, _, zero_legal = (spec if name in spec else LEVEL_FACTS)[name]
            facts[fact] = _changed(key, name, facts[fact], value, dimension, zero_legal)
    return _rebuilt(cluster, device, up, out, own)


def _changed(
    key: str, name: str, old: Fact, value: str | float, dimension: str, zero_legal: bool
) -> Fact:
    """The fact with another value; its birth certificate says that it is assumed."""
    given = str(value)
    factor, amount = _FACTOR.fullmatch(given), _AMOUNT.fullmatch(given)
    unit, matched = old.unit, factor or amount
    try:
        number = float(matched.group(1)) if matched else float("nan")
    except ValueError:
        number = float("nan")
    if factor:
        number *= old.written
    elif amount and amount.group(2):
        unit = amount.group(2)
    elif dimension not in ("count", "ratio", "flag"):
        number = float("nan")  # an amount without its unit
    if number != number or dimension_of(unit) != dimension:
        units = units_of(dimension)
        raise ProfileError(
            f"{key} = {given[:40]!r} is neither a factor such as '0.5x' nor an amount such as "
            f"'{old.written:g} {old.unit}'; legal units: {', '.join(units)}",
            values={"fact": key, "value": given[:40]},
            legal={"unit": units},
        )
    check_value(name, number, dimension, zero_legal, key)
    return Fact(
        to_si(number, unit),
        number,
        unit,
        "assumed",
        "what-if",
        old.per,
        f"{given} in place of {old.written:g} {old.unit}",
    )


def _rebuilt(
    cluster: Cluster,
    device: dict[str, Fact],
    up: dict[str, Fact],
    out: dict[str, Fact],
    own: dict[str, Fact],
) -> Cluster:
    """Build again from facts, with the curves scaled to the changed facts."""
    old = cluster.device
    bandwidth = "memory_bandwidth"
    if device[bandwidth] is not old.facts[bandwidth]:  # the achieved rate follows the data sheet
        achieved = "achieved_memory_bandwidth"
        if device[achieved] is old.facts[achieved]:
            ratio = device[bandwidth].value / old.facts[bandwidth].value
            fact = device[achieved]
            device[achieved] = replace(
                fact,
                value=fact.value * ratio,
                written=fact.written * ratio,
                kind="assumed",
                source="what-if",
                note="follows memory_bandwidth",
            )
    ratios = {
        precision: device[f"peak_{precision}"].value / peak
        for precision, peak in old.peak_flops_per_s.items()
    }
    sms = device["num_sms"].value / old.num_sms
    gemm = {
        name: _scaled_gemm(curve, ratios.get(name.split("_")[0], 1.0), sms)
        for name, curve in old.gemm.items()
    }
    main = ratios.get("bf16", ratios.get("fp16", 1.0))
    attention = {name: _scaled_attention(curve, main) for name, curve in old.attention.items()}
    link = build_link(cluster.scale_up.name, up)
    before = cluster.scale_up
    speed = (link.bytes_per_s * link.achieved_fraction) / (
        before.bytes_per_s * before.achieved_fraction
    )
    curves = {op: _scaled_collective(curve, speed) for op, curve in cluster.curves.items()}
    return build_cluster(
        cluster.name,
        build_device(old.name, old.vendor, old.arch, device, gemm, attention),
        link,
        build_link(cluster.scale_out.name, out),
        own,
        tuple(level.name for level in cluster.levels),
        transports=cluster.transports,
        description=cluster.description,
        curves=curves,
    )


def _note(note: str, ratio: float) -> str:
    return f"{note}; x {ratio:.4g} by a what-if".lstrip("; ")


def _scaled_gemm(curve: GemmCurve, ratio: float, sms: float) -> GemmCurve:
    if ratio == 1.0 and sms == 1.0:
        return curve
    return replace(
        curve,
        tile_flops_per_s=curve.tile_flops_per_s * ratio,
        cap_flops_per_s=curve.cap_flops_per_s * ratio,
        num_sms=max(1, round(curve.num_sms * sms)),
        unaligned_flops_per_s=curve.unaligned_flops_per_s * sms,
        kind="derived",
        note=_note(curve.note, ratio),
    )


def _scaled_attention(curve: AttentionCurve, ratio: float) -> AttentionCurve:
    if ratio == 1.0:
        return curve
    return replace(
        curve,
        forward_flops_per_s=curve.forward_flops_per_s * ratio,
        backward_flops_per_s=curve.backward_flops_per_s * ratio,
        kind="derived",
        note=_note(curve.note, ratio),
    )


def _scaled_collective(curve: CollectiveCurve, ratio: float) -> CollectiveCurve:
    """Latency (the time of the smallest message) stays; what is above it follows the rate."""
    if ratio == 1.0:
        return curve
    floor = curve.seconds.min(axis=1, keepdims=True)
    return replace(
        curve,
        seconds=floor + (curve.seconds - floor) / ratio,
        kind="derived",
        note=_note(curve.note, ratio),
    )
