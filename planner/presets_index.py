"""Models by name: the presets in `planner/presets/`, and what else a person may mean by a name."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from planner.config_fields import near
from planner.errors import ModelError
from planner.specs import ModelSpec

PRESET_DIR = Path(__file__).parent / "presets"

# Other names of a preset, after `plain_name`.
ALIASES = {
    "bloom": "bloom-176b",
    "gpt-3": "gpt-3-175b",
    "gpt3-175b": "gpt-3-175b",
    "megatron-1t": "megatron-1008b",
    "gpt-3-1000b": "gpt-3-1t",
    "mt-nlg-530b": "gpt-3-530b",
    "gemma-1-2b": "gemma-2b",
    "gemma-1-7b": "gemma-7b",
    "grok-1-314b": "grok-1",
    "kimi-k2-1t": "kimi-k2",
    "glm-4.5-355b-a32b": "glm-4.5",
    "glm-4.5-air-106b-a12b": "glm-4.5-air",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "llama-33b": "llama-30b",
    "mistral-large": "mistral-large-123b",
    "mistral-large-2407": "mistral-large-123b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-nemo-2407": "mistral-nemo-12b",
    "mistral-small-24b-2501": "mistral-small-24b",
    "olmo-2-1124-7b": "olmo-2-7b",
    "olmo-2-1124-13b": "olmo-2-13b",
    "olmo-2-0325-32b": "olmo-2-32b",
    "olmoe-1b-7b-0924": "olmoe-1b-7b",
    "phi-3-mini-4k": "phi-3-mini",
    "phi-3-mini-128k": "phi-3-mini",
    "phi-3-medium-4k": "phi-3-medium",
    "qwen3-next": "qwen3-next-80b-a3b",
    "tinyllama": "tinyllama-1.1b",
    "tinyllama-1.1b-v1.0": "tinyllama-1.1b",
    "vit-b-16": "vit-base",
    "vit-l-16": "vit-large",
    "vit-h-14": "vit-huge",
    "vit-base-patch16-224": "vit-base",
    "vit-large-patch16-224": "vit-large",
}
# Words in a published name that say how a model was tuned, not how it is built.
TUNING = ("instruct", "chat", "base", "hf", "it", "pt", "v0.1")


def plain_name(name: str) -> str:
    """A model's published name in the form that presets have.

    >>> plain_name("meta-llama/Meta-Llama-3-70B-Instruct")
    'llama-3-70b'
    >>> plain_name("Llama2-7b-hf")
    'llama-2-7b'
    """
    plain = name.rsplit("/", 1)[-1].strip().lower().replace("_", "-")
    plain = re.sub(r"^meta-(?=llama)", "", plain)
    plain = re.sub(r"^(llama|gemma|opt|olmo|gpt-neox|mixtral|phi)(?=\d)", r"\1-", plain)
    while plain.rsplit("-", 1)[-1] in TUNING and "-" in plain:
        plain = plain.rsplit("-", 1)[0]
    return plain


@lru_cache(maxsize=1)
def _files() -> dict[str, Path]:
    """Preset name -> file."""
    found = [path for path in PRESET_DIR.iterdir() if path.suffix in (".json", ".toml")]
    return {path.name.removesuffix(path.suffix): path for path in sorted(found)}


def _natural(name: str) -> list[tuple[int, float, str]]:
    parts = re.findall(r"\d+(?:\.\d+)?|[^\d]+", name)
    return [(0, float(part), "") if part[0].isdigit() else (1, 0.0, part) for part in parts]


def available_models() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(sorted(_files(), key=_natural))


@lru_cache(maxsize=64)
def _load_preset(name: str) -> ModelSpec:
    from planner.hf_config import model_from_path

    return replace(model_from_path(_files()[name]), name=name)


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A model by preset name, or from a config.json, a folder that holds one, or a TOML file.

    Raises
    ------
    ModelError
        No such preset or file, with the nearest names; or a file that is wrong.
    """
    text = str(name_or_path)
    plain = plain_name(text)
    for name in (text, plain, ALIASES.get(plain, "")):
        if name in _files():
            return _load_preset(name)
    try:
        there = Path(name_or_path).exists()
    except (OSError, ValueError):
        there = False
    if (there and text.strip()) or Path(text).suffix in (".json", ".toml"):
        from planner.hf_config import model_from_path

        return model_from_path(name_or_path)
    close = near(plain, available_models())
    hint = f"did you mean {', '.join(close)}?" if close else "`shardwise models` lists them."
    raise ModelError(
        f"no model is called {text[:80]!r}, and no file of that name exists; {hint}",
        values={"model": text[:200]},
        legal={"model": close or list(available_models())},
    )
