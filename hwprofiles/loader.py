"""TOML -> Device, Link, Cluster. Refuses unknown keys and facts without unit, kind or source.

A cluster file names its parts: ``device``, ``scale_up`` and ``scale_out`` are each the name of a
shipped part, the path of another TOML file relative to this one, or a table in place. A file of
one's own may say ``extends = "dgx-h100"`` and give only what differs, and may bring its own curves.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hwprofiles.build import build_cluster, build_device, build_link
from hwprofiles.curves import load_attention_curves, load_collective_curves, load_gemm_curves
from hwprofiles.errors import ProfileError
from hwprofiles.facts import (
    CLUSTER_FACTS,
    DEVICE_FACTS,
    LEVEL_FACTS,
    LINK_FACTS,
    near,
    read_facts,
    refuse_unknown,
    text,
)
from hwprofiles.profile import Cluster, Device, Fact, Link

HERE = Path(__file__).parent
MAX_FILE_BYTES = 1_000_000
MAX_EXTENDS = 8
DEVICE_WORDS = ("name", "title", "vendor", "arch", "gemm", "attention")
CLUSTER_WORDS = (
    "name",
    "extends",
    "description",
    "device",
    "scale_up",
    "scale_out",
    "transports",
    "curves",
    "levels",
)
NAME_LETTERS = set("abcdefghijklmnopqrstuvwxyz0123456789-._")


def _shipped(folder: str) -> list[str]:
    return sorted(path.stem for path in (HERE / folder).glob("*.toml"))


def available_clusters() -> list[str]:
    """Names of the shipped clusters, and ``local`` for this machine."""
    return [*_shipped("clusters"), "local"]


def available_devices() -> list[str]:
    """Names of the shipped devices."""
    return _shipped("devices")


def available_links() -> list[str]:
    """Names of the shipped links."""
    return _shipped("links")


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file of at most 1 MB; whatever is wrong with it is a ProfileError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or "not a legal path"
        raise ProfileError(
            f"cannot read {str(path)!r}: {reason}", values={"path": str(path)}
        ) from error
    return parse_toml(content, str(path))


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """TOML bytes -> tables."""
    if len(content) > MAX_FILE_BYTES:
        raise ProfileError(
            f"{where} is larger than {MAX_FILE_BYTES} bytes and cannot be a profile",
            values={"path": where},
        )
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ProfileError(f"{where} is nested too deeply", values={"path": where}) from None
    except ValueError as error:  # also TOMLDecodeError and UnicodeDecodeError
        raise ProfileError(
            f"{where} is not TOML: {str(error)[:200]}", values={"path": where}
        ) from error


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name or "\\" in name


def _find(name: str, folder: str, what: str, base: Path | None) -> Path:
    """The file of a shipped part, or of a path relative to `base`."""
    if _is_path(name):
        path = Path(name).expanduser() if "\0" not in name else Path("?")
        return path if base is None or path.is_absolute() else base / path
    known = _shipped(folder)
    if name not in known:
        extra = ["local"] if folder == "clusters" else []
        close = near(name, [*known, *extra])
        if folder == "clusters" and name in _shipped("devices"):
            close = _clusters_of(name) or close
            raise ProfileError(
                f"{name!r} is a device and not a cluster; clusters of it: {', '.join(close[:8])}",
                values={what: name},
                legal={what: close},
            )
        raise ProfileError(
            f"{what} {name[:60]!r} is not known; near names: {', '.join(close[:8])}",
            values={what: name[:60]},
            legal={what: close},
        )
    return HERE / folder / f"{name}.toml"


def _clusters_of(device: str) -> list[str]:
    """Shipped clusters whose file names the device."""
    line = f'\ndevice = "{device}"\n'
    return [
        path.stem for path in sorted((HERE / "clusters").glob("*.toml")) if line in path.read_text()
    ]


def _named(table: Mapping[str, Any], path: Path | None, where: str) -> str:
    """The name of a part: what it says, else the name of its file."""
    name = text(table, "name", where) if "name" in table or path is None else path.stem
    if not name or set(name) - NAME_LETTERS or len(name) > 80:
        raise ProfileError(
            f"{where}: name {name[:60]!r} may hold lower-case letters, digits, '-', '.' and '_' "
            f"only, 80 at most",
            values={"name": name[:60]},
        )
    return name


def load_device(name: str | Path) -> Device:
    """A device by name, or from a TOML file.

    >>> load_device("h100-sxm").num_sms
    132
    """
    return _device(str(name), None)


def load_link(name: str | Path) -> Link:
    """A link by name, or from a TOML file.

    >>> load_link("ib-ndr").bytes_per_s
    50000000000.0
    """
    return _link(str(name), None)


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by name, from a TOML file, or ``local`` (``local:4`` for four processes).

    >>> cluster = load_cluster("dgx-h100")
    >>> cluster.gpus_per_node, cluster.device.name
    (8, 'h100-sxm')
    """
    if isinstance(name, str) and (name == "local" or name.startswith("local:")):
        from hwprofiles.local import local_cluster

        return local_cluster(name)
    return _shipped_cluster(str(name)) if not _is_path(str(name)) else _cluster_file(str(name))


@lru_cache(maxsize=64)
def _shipped_cluster(name: str) -> Cluster:
    return _cluster_file(name)


def _cluster_file(name: str) -> Cluster:
    path = _find(name, "clusters", "cluster", None)
    return cluster_from(read_toml(path), path)


def _part(
    raw: Any, folder: str, what: str, base: Path | None
) -> tuple[dict[str, Any], Path | None]:
    """Table and file of a part that is named, is a file, or is a table in place."""
    if isinstance(raw, Mapping):
        return dict(raw), None
    if not isinstance(raw, str) or not raw.strip():
        raise ProfileError(
            f"{what} must be the name of a shipped one, the path of a TOML file, or a table",
            values={what: type(raw).__name__},
            legal={what: _shipped(folder)},
        )
    path = _find(raw, folder, what, base)
    return read_toml(path), path


def _device(raw: Any, base: Path | None) -> Device:
    table, path = _part(raw, "devices", "device", base)
    where = f"device file {str(path)!r}" if path else "table 'device'"
    facts = read_facts(table, DEVICE_FACTS, where, others=DEVICE_WORDS)
    name = _named(table, path, where)
    text(table, "title", where, needed=False)
    arch = text(table, "arch", where)
    peaks = {key[5:]: fact.value for key, fact in facts.items() if key.startswith("peak_")}
    num_sms = int(facts["num_sms"].value)
    gemm = load_gemm_curves(name, peaks, num_sms, arch)
    attention = load_attention_curves(name, arch, peaks)
    if "gemm" in table or "attention" in table:
        from hwprofiles.own_curves import read_attention, read_gemm

        gemm |= read_gemm(table.get("gemm", {}), num_sms, f"{where}: gemm")
        attention |= read_attention(table.get("attention", {}), f"{where}: attention")
    return build_device(
        name,
        text(table, "vendor", where),
        arch,
        facts,
        gemm,
        attention,
    )


def _link(raw: Any, base: Path | None, what: str = "link") -> Link:
    table, path = _part(raw, "links", what, base)
    where = f"link file {str(path)!r}" if path else f"table {what!r}"
    facts = read_facts(table, LINK_FACTS, where, others=("name", "title"))
    text(table, "title", where, needed=False)
    return build_link(_named(table, path, where), facts)


def _extended(table: dict[str, Any], base: Path | None, depth: int = 0) -> dict[str, Any]:
    """The table over the one it extends: what it gives replaces, the rest stays."""
    if "extends" not in table:
        return table
    if depth >= MAX_EXTENDS:
        raise ProfileError(
            f"cluster files extend each other more than {MAX_EXTENDS} times; do they form a ring?",
            values={"extends": str(table["extends"])[:60]},
        )
    path = _find(text(table, "extends", "cluster file"), "clusters", "cluster", base)
    below = _extended(read_toml(path), path.parent, depth + 1)
    for part in ("device", "scale_up", "scale_out"):  # paths stay relative to their own file
        value = below.get(part)
        if isinstance(value, str) and _is_path(value):
            below[part] = str(path.parent / value)
    return {**below, **{key: value for key, value in table.items() if key != "extends"}}


def cluster_from(table: dict[str, Any], path: Path | None) -> Cluster:
    """A cluster from its tables; `path` gives its name and the place of relative paths."""
    where = f"cluster file {path.name!r}" if path else "cluster"
    base = path.parent if path else None
    own_name = _named(table, path, where)
    table = _extended(table, base)
    facts = read_facts(table, CLUSTER_FACTS, where, others=CLUSTER_WORDS)
    for part in ("device", "scale_up", "scale_out"):
        if part not in table:
            raise ProfileError(f"{where} lacks {part!r}", values={"missing": part})
    level_names = _read_levels(table.get("levels", []), facts, where)
    transports = table.get("transports", [])
    if not isinstance(transports, list) or not all(isinstance(t, str) for t in transports):
        raise ProfileError(f"{where}: transports must be a list of names")
    device = _device(table["device"], base)
    scale_up = _link(table["scale_up"], base, "scale_up")
    domain = int(facts["domain_gpus"].value)
    curves = load_collective_curves(own_name, device.name, scale_up.name, domain)
    if "curves" in table:
        from hwprofiles.own_curves import read_collectives

        curves |= read_collectives(table["curves"], f"{where}: curves")
    return build_cluster(
        own_name,
        device,
        scale_up,
        _link(table["scale_out"], base, "scale_out"),
        facts,
        level_names,
        transports=tuple(transports),
        description=text(table, "description", where, needed=False),
        curves=curves,
    )


def _read_levels(raw: Any, facts: dict[str, Fact], where: str) -> tuple[str, ...]:
    """Add the facts of the network levels, lowest first, under ``level.<name>.<fact>``."""
    if not isinstance(raw, list) or not all(isinstance(level, Mapping) for level in raw):
        raise ProfileError(f"{where}: levels must be tables [[levels]], lowest level first")
    if len(raw) > 8:
        raise ProfileError(f"{where} has {len(raw)} network levels, and 8 is the most")
    names: list[str] = []
    for level in raw:
        name = text(level, "name", f"{where}, level")
        at = f"{where}, level {name[:40]!r}"
        refuse_unknown(level, ["name", *LEVEL_FACTS], at)
        if name in names or set(name) - NAME_LETTERS:
            raise ProfileError(f"{at}: a level's name is lower-case and given once")
        for key, fact in read_facts(level, LEVEL_FACTS, at, others=("name",)).items():
            facts[f"level.{name}.{key}"] = fact
        names.append(name)
    return tuple(names)
