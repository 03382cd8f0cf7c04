"""What a family's reader hands back, and the fields that most families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.config_fields import MAX_LAYERS, Fields
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec, TowerSpec


@dataclass(frozen=True, slots=True)
class Parts:
    """A model read from its config, before its layers are sorted into kinds."""

    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    tie: bool = False  # where the config does not say
    more: dict[str, Any] = field(default_factory=dict)  # further fields of ModelSpec
    tower: TowerSpec | None = None


def check_heads(fields: Fields, hidden: int, heads: int, kv_heads: int) -> None:
    """Refuse key-value heads that do not divide the query heads."""
    if kv_heads > heads or heads % kv_heads:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        error = fields.fail(
            f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}.",
            num_key_value_heads=kv_heads,
            num_attention_heads=heads,
            hidden_size=hidden,
        )
        error.legal = {"num_key_value_heads": legal[:12]}
        raise error


def head_dim_of(
    fields: Fields, hidden: int, heads: int, *keys: str, published: int | None = None
) -> int:
    """head_dim as stated, as its class has it, or hidden_size over heads where that is whole."""
    for key in keys or ("head_dim",):
        if fields.has(key):
            return fields.width(key)
    if published is not None:
        return published
    if hidden % heads:
        raise fields.fail(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, "
            "and no head_dim is given.",
            hidden_size=hidden,
            num_attention_heads=heads,
        )
    return hidden // heads


def read_gqa(
    fields: Fields,
    hidden: int,
    *,
    head_dim: int | None = None,
    kv_needed: bool = False,
    **more: Any,
) -> AttentionSpec:
    """Grouped-query attention in the usual key names.

    `head_dim` is what the family's class has where the config is silent (None: hidden_size over
    heads); `kv_needed` refuses a config without num_key_value_heads, where silence does not mean
    as many as query heads.
    """
    heads = fields.width("num_attention_heads")
    kv_heads = fields.width("num_key_value_heads", default=None if kv_needed else heads)
    check_heads(fields, hidden, heads, kv_heads)
    head_dim = head_dim_of(fields, hidden, heads, published=head_dim)
    return AttentionSpec(heads, kv_heads, head_dim, **more)


def num_layers(fields: Fields, *keys: str) -> int:
    return fields.integer(*(keys or ("num_hidden_layers",)), high=MAX_LAYERS)


def activation(fields: Fields, default: str = "silu") -> str:
    for key in ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"):
        if fields.has(key):
            return fields.word(key)
    return default


def windows(
    fields: Fields, layers: int, window: int | None, sliding: Sequence[bool]
) -> list[int | None]:
    """The window of each layer: layer_types where given, else the family's own pattern."""
    types = fields.items("layer_types", str, layers)
    if types is None:
        return [window if slides else None for slides in sliding]
    known = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}
    for name in types:
        if name not in known:
            raise fields.fail(
                f"layer_types has {name[:40]!r}, known here are {', '.join(known)}.",
                layer_types=name,
            )
        if known[name] and window is None:
            raise fields.fail(
                f"layer_types has {name!r}, but sliding_window is not given.", layer_types=name
            )
    return [window if known[name] else None for name in types]


def decoder_layers(
    attention: AttentionSpec,
    layer_windows: Sequence[int | None],
    feed_forward: Sequence[MlpSpec | MoeSpec],
    *,
    norms: int = 2,
    parallel: bool = False,
) -> tuple[LayerSpec, ...]:
    """One LayerSpec a layer, from its window and its feed-forward."""
    cache: dict[tuple[int | None, MlpSpec | MoeSpec], LayerSpec] = {}
    layers = []
    for window, block in zip(layer_windows, feed_forward, strict=True):
        if (window, block) not in cache:
            own = attention if window is None else replace(attention, window=window)
            cache[window, block] = LayerSpec(
                own,
                mlp=block if isinstance(block, MlpSpec) else None,
                moe=block if isinstance(block, MoeSpec) else None,
                norms=norms,
                parallel=parallel,
            )
        layers.append(cache[window, block])
    return tuple(layers)


def read_moe(
    fields: Fields, *, experts: Sequence[str], top_k: Sequence[str], width: str, **more: Any
) -> MoeSpec:
    """Routed experts, with top-k not above their number."""
    num_experts = fields.integer(*experts, high=65536)
    chosen = fields.integer(*top_k, high=65536)
    if chosen > num_experts:
        error = fields.fail(
            f"{top_k[0]}={chosen} is more than {experts[0]}={num_experts}, the experts there are.",
            **{top_k[0]: chosen, experts[0]: num_experts},
        )
        error.legal = {top_k[0]: [1, num_experts]}
        raise error
    return MoeSpec(num_experts, chosen, fields.width(width), **more)
