"""Vision towers in front of a decoder: SigLIP (Gemma-3), Llama-4, Qwen2-VL and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Callable

from planner.config_fields import MAX_LAYERS, Fields
from planner.families.classic import vit_layer
from planner.families.parts import head_dim_of, num_layers
from planner.specs import TowerSpec


def _patches(vision: Fields, image: int, patch: int) -> int:
    if patch > image:
        raise vision.refuse("patch_size", f"at most image_size={image}")
    return (image // patch) ** 2


def read_siglip(vision: Fields, text_hidden: int) -> TowerSpec:
    """SigLIP with Gemma-3's projector: one matrix and a norm."""
    hidden = vision.width("hidden_size", default=1152)
    heads = vision.width("num_attention_heads", default=16)
    patch = vision.width("patch_size", default=14)
    patches = _patches(vision, vision.width("image_size", default=896), patch)
    pixels = vision.width("num_channels", default=3) * patch * patch
    if vision.flag("vision_use_head", default=False):
        raise vision.fail("vision_use_head=true (a pooling head) is not supported.")
    embedding = (pixels + 1) * hidden + patches * hidden
    projector = hidden * text_hidden + hidden
    return TowerSpec(
        hidden,
        num_layers(vision),
        vit_layer(
            hidden,
            heads,
            vision.width("intermediate_size", default=4304),
            head_dim_of(vision, hidden, heads),
        ),
        tokens=patches,
        other_params=embedding + 2 * hidden + projector,
    )


def read_llama4_vision(vision: Fields, text_hidden: int) -> TowerSpec:
    """Llama-4's encoder; a config that leaves the tower out means the published defaults."""
    hidden = vision.width("hidden_size", default=768)
    heads = vision.width("num_attention_heads", default=16)
    patch = vision.width("patch_size", default=14)
    patches = _patches(vision, vision.width("image_size", default=448), patch)
    pixels = vision.width("num_channels", default=3) * patch * patch
    width = vision.width("intermediate_size", default=5632)
    inner = vision.width("projector_input_dim", default=4096)
    out = vision.width("projector_output_dim", default=4096)
    embedding = pixels * hidden + hidden + (patches + 1) * hidden
    adapter = width * inner + out * out
    projector = vision.width("vision_output_dim", default=7680) * text_hidden
    return TowerSpec(
        hidden,
        num_layers(vision) if vision.has("num_hidden_layers") else 34,
        vit_layer(hidden, heads, width, head_dim_of(vision, hidden, heads)),
        tokens=patches + 1,
        other_params=embedding + 4 * hidden + adapter + projector,
    )


def read_qwen2_vl(vision: Fields, text_hidden: int) -> TowerSpec:
    """Qwen2-VL: no position table; patches merge two by two into the decoder's width.

    Images come in any size: `tokens` counts one of 1024 x 1024 pixels, rounded to whole patches.
    """
    hidden = vision.width("embed_dim", default=1280)
    heads = vision.width("num_heads", default=16)
    patch = vision.width("patch_size", default=14)
    merge = vision.integer("spatial_merge_size", default=2, high=64)
    frames = vision.integer("temporal_patch_size", default=2, high=64)
    pixels = vision.width("in_channels", "in_chans", default=3) * frames * patch * patch
    width = int(vision.number("mlp_ratio", 4.0) * hidden)
    merged = hidden * merge * merge
    out = vision.width("hidden_size", default=text_hidden)
    merger = 2 * hidden + (merged + 1) * merged + (merged + 1) * out
    return TowerSpec(
        hidden,
        vision.integer("depth", default=32, high=MAX_LAYERS),
        vit_layer(hidden, heads, width, head_dim_of(vision, hidden, heads)),
        tokens=_patches(vision, max(1024, patch), patch),
        other_params=pixels * hidden + merger,
    )


def read_qwen3_vl(vision: Fields, text_hidden: int) -> TowerSpec:
    """Qwen3-VL and Qwen3.5: learned positions, one merger and one more per deepstack level.

    Images come in any size: `tokens` counts one that covers the grid of positions.
    """
    hidden = vision.width("hidden_size")
    heads = vision.width("num_heads")
    patch = vision.width("patch_size")
    merge = vision.integer("spatial_merge_size", default=2, high=64)
    frames = vision.integer("temporal_patch_size", default=2, high=64)
    pixels = vision.width("in_channels", default=3) * frames * patch * patch
    merged = hidden * merge * merge
    out = vision.width("out_hidden_size")
    merger = (merged + 1) * merged + (merged + 1) * out
    levels = len(vision.items("deepstack_visual_indexes", int) or [])
    positions = vision.count("num_position_embeddings", low=1)
    depth = vision.integer("depth", high=MAX_LAYERS)
    return TowerSpec(
        hidden,
        depth,
        vit_layer(
            hidden, heads, vision.width("intermediate_size"), head_dim_of(vision, hidden, heads)
        ),
        tokens=positions,
        other_params=(pixels + 1) * hidden
        + positions * hidden
        + merger
        + 2 * hidden
        + levels * (merger + 2 * merged),
    )


TowerReader = Callable[[Fields, int], TowerSpec]

# model_type of the whole -> (model_type of its text part, reader of its tower, tower by default)
WITH_TOWER: dict[str, tuple[str, TowerReader, bool]] = {
    "gemma3": ("gemma3_text", read_siglip, False),
    "llama4": ("llama4_text", read_llama4_vision, True),
    "qwen2_vl": ("qwen2", read_qwen2_vl, False),
    "qwen3_vl_moe": ("qwen3_moe", read_qwen3_vl, False),
    "qwen3_vl": ("qwen3", read_qwen3_vl, False),
    "qwen3_5_moe": ("qwen3_5_moe_text", read_qwen3_vl, False),
    "qwen3_5": ("qwen3_5_text", read_qwen3_vl, False),
}
