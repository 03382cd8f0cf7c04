"""Reads a Hugging Face ``config.json`` into a ModelSpec.

The file is data and nothing else: no code that it names is loaded (``auto_map`` is ignored), every
value is checked, and an architecture that is not known is refused by name, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.config_fields import Fields, near, shown
from planner.errors import ModelError
from planner.families import classic, dense, hybrid, moe, vision
from planner.families.parts import Parts
from planner.specs import LayerSpec, ModelSpec

MAX_FILE_BYTES = 16 << 20

READERS: dict[str, Callable[[Fields], Parts]] = {
    **dense.READERS,
    **moe.READERS,
    **classic.READERS,
    **hybrid.READERS,
}
# For configs without model_type, and for remote code that reuses a family's config.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "BloomForCausalLM": "bloom",
    "FalconForCausalLM": "falcon",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
}
ALIASES = {"gemma3_text_only": "gemma3_text", "internlm3": "llama", "RefinedWeb": "falcon"}


def known_model_types() -> list[str]:
    """Every model_type that `model_from_config` reads."""
    return sorted({*READERS, *vision.WITH_TOWER})


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that a Hugging Face config describes.

    Raises
    ------
    ModelError
        Unknown architecture; a missing, impossible or contradictory value; a part that the cost
        model does not have.

    >>> model = model_from_config({"model_type": "llama", "hidden_size": 64, "vocab_size": 100,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}, "small")
    >>> model.num_hidden_layers, model.kinds[0].attention.head_dim
    (2, 16)
    """
    if not isinstance(config, Mapping):
        raise ModelError(
            f"{name}: a model config must be a JSON object, this is a {type(config).__name__}.",
            values={"config": shown(config)},
        )
    if not all(isinstance(key, str) for key in config):
        raise ModelError(f"{name}: every key of a model config must be text.")
    whole = Fields(config, name)
    model_type = _model_type(whole)
    text, tower_reader, by_default = whole, None, False
    if model_type in vision.WITH_TOWER:
        model_type, tower_reader, by_default = vision.WITH_TOWER[model_type]
        text = whole.sub("text_config") or whole
    elif whole.has("text_config"):
        raise whole.fail(
            f"a text_config inside model_type={model_type!r} is not a known combination.",
            model_type=model_type,
        )
    parts = READERS[model_type](text)
    tower = parts.tower
    if tower_reader is not None:
        seen = whole.sub("vision_config")
        if seen is None and not by_default:
            raise whole.missing("vision_config")
        empty = Fields({}, f"{name}: vision_config")
        tower = tower_reader(seen or empty, parts.hidden_size)
    kinds, layer_kinds = sort_kinds(parts.layers)
    tie = text.flag(
        "tie_word_embeddings", default=whole.flag("tie_word_embeddings", default=parts.tie)
    )
    more = dict(parts.more)
    more.setdefault("max_position_embeddings", text.count("max_position_embeddings", default=0))
    return ModelSpec(
        name=name,
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        kinds=kinds,
        layer_kinds=layer_kinds,
        tie_word_embeddings=tie,
        tower=tower,
        source=_printable(whole.word("source")),
        **more,
    )


def _printable(text: str) -> str:
    return "".join(sign for sign in text if sign.isprintable())


def sort_kinds(layers: tuple[LayerSpec, ...]) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
    """The distinct layers in order of appearance, and for each layer which one it is."""
    index: dict[LayerSpec, int] = {}
    layer_kinds = tuple(index.setdefault(layer, len(index)) for layer in layers)
    return tuple(index), layer_kinds


def _model_type(whole: Fields) -> str:
    """model_type, or what the first architecture says where there is no model_type."""
    model_type = whole.word("model_type")
    if not model_type:
        classes = whole.items("architectures", str) or []
        if not classes:
            raise whole.missing("model_type", "architectures")
        if classes[0] not in ARCHITECTURES:
            raise ModelError(
                f"{whole.where}: architecture {classes[0][:60]!r} is not known, and the config has "
                "no model_type.",
                values={"architectures": shown(classes[0])},
                legal=near(classes[0], ARCHITECTURES),
            )
        return ARCHITECTURES[classes[0]]
    model_type = ALIASES.get(model_type, model_type)
    if model_type not in READERS and model_type not in vision.WITH_TOWER:
        close = near(model_type, known_model_types())
        hint = f"near: {', '.join(close)}" if close else "nothing known is near it"
        raise ModelError(
            f"{whole.where}: model_type={model_type[:60]!r} is not supported, its layers are not "
            f"known here ({hint}).",
            values={"model_type": shown(model_type)},
            legal={"model_type": close or known_model_types()},
        )
    return model_type


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def read_text(path: Path, form: str) -> str:
    """The text of a regular file of modest size, or a ModelError."""
    where = {"path": str(path)}
    try:
        if not path.is_file():
            what = "not a regular file" if path.exists() else "there is no such file"
            raise ModelError(f"{path}: cannot be read ({what}).", values=where)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path}: above {MAX_FILE_BYTES} bytes, no model file is so large.")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not text, a model file is {form} in UTF-8.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{path}: cannot be read ({reason}).", values=where) from None


def read_json(path: Path) -> Any:
    """The JSON value in `path`, or a ModelError that says why it cannot be read."""
    try:
        return json.loads(read_text(path, "JSON"), object_pairs_hook=_unique)
    except RecursionError:
        raise ModelError(f"{path}: nested too deep for a model config.") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error}).", values={"path": str(path)}) from None


def model_from_path(path: str | Path) -> ModelSpec:
    """The model in `path`: a config.json, a folder that holds one, or a TOML file of our own."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".toml":
        from planner.model_toml import model_from_toml

        return model_from_toml(path)
    folder = path.absolute().parent.name
    name = folder if path.name == "config.json" and folder else path.stem
    return model_from_config(read_json(path), name)
