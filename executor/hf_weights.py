"""Weights from and to Hugging Face folders: safetensors and a config, of Llama, Qwen and Mixtral.

Nothing in a folder is executed. Each rank reads what its parameters need and keeps its shard;
saving, each pipeline stage writes its own files and rank 0 the index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.details import Details, details_from_config
from executor.weights import assign, named_values
from planner.errors import InputError, ModelError
from planner.files import write_whole
from planner.specs import ModelSpec

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
MOE = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*LLAMA_LIKE, *MOE)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MAX_FILE_BYTES = 4 << 30

ENDS = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
PARTS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.shared.gate": "mlp.shared_expert.gate_proj",
    "moe.shared.up": "mlp.shared_expert.up_proj",
    "moe.shared.down": "mlp.shared_expert.down_proj",
    "moe.shared_gate": "mlp.shared_expert_gate",
}
MIXTRAL_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def theirs(name: str, family: str, num_experts: int) -> list[str]:
    """Names under which Hugging Face stores one of our values: one, or one an expert.

    >>> theirs("layers.3.attention.out.weight", "llama", 0)
    ['model.layers.3.self_attn.o_proj.weight']
    >>> theirs("layers.0.moe.experts.up", "mixtral", 2)[1]
    'model.layers.0.block_sparse_moe.experts.1.w3.weight'
    """
    found = LAYER.fullmatch(name)
    if found is None:
        part, _, kind = name.rpartition(".")
        return [f"{ENDS[part]}.{kind}"]
    layer, rest = f"model.layers.{found[1]}", found[2]
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    if rest.startswith("moe.experts."):
        matrix = rest.rpartition(".")[2]
        inner = MIXTRAL_EXPERTS[matrix] if family == "mixtral" else f"{matrix}_proj"
        return [f"{layer}.{block}.experts.{e}.{inner}.weight" for e in range(num_experts)]
    if rest.startswith("moe.router."):
        return [f"{layer}.{block}.gate.{rest.rpartition('.')[2]}"]
    part, _, kind = rest.rpartition(".")
    return [f"{layer}.{PARTS[part]}.{kind}"]


def is_stack(name: str) -> bool:
    """Whether a value holds all experts of a layer, which are stored one by one."""
    return ".moe.experts." in name


def experts_of(name: str, model: ModelSpec) -> int:
    """Number of experts of the layer that a value is of; 0 where it has none."""
    found = LAYER.fullmatch(name)
    moe = model.kinds[model.layer_kinds[int(found[1])]].moe if found else None
    return moe.num_experts if moe else 0


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config of a folder, of a family whose weights are known here.

    Raises
    ------
    ModelError
        No readable config, or another family.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", values={"path": str(path)}) from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in FAMILIES:
        raise ModelError(
            f"{path} is of model_type={str(family)[:40]!r}, whose weights are not known here; "
            f"legal are {', '.join(FAMILIES)}",
            values={"model_type": family},
            legal={"model_type": list(FAMILIES)},
        )
    return dict(config)


def details_of_folder(folder: str | Path) -> Details:
    """Rotary base, norm epsilon and so on of the model in a folder."""
    return details_from_config(read_config(folder))


class Folder:
    """The tensors of a folder by name; files are mapped, and tensors read when asked for."""

    def __init__(self, folder: str | Path, stack: ExitStack) -> None:
        self.path = Path(folder)
        self.stack = stack
        self.files: dict[str, Any] = {}
        self.file_of = self._file_names()

    def _file_names(self) -> dict[str, str]:
        index = self.path / INDEX
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {str(name): str(file) for name, file in named.items()}
            except (ValueError, KeyError, AttributeError) as error:
                raise InputError(
                    f"{index} is no index of weights", values={"path": str(index)}
                ) from error
        if not (self.path / WHOLE).is_file():
            raise InputError(
                f"{self.path} has neither {WHOLE} nor {INDEX}; weights are read from safetensors "
                "alone",
                values={"path": str(self.path)},
            )
        return dict.fromkeys(self._open(WHOLE).keys(), WHOLE)

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self.files:
            path = self.path / name
            if Path(name).name != name or not path.is_file():
                raise InputError(f"{self.path} lacks its file {name[:80]}", values={"file": name})
            try:
                opened = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise InputError(
                    f"{path} is damaged: {error}", values={"path": str(path)}
                ) from error
            self.files[name] = self.stack.enter_context(opened)
        return self.files[name]

    def read(self, names: Sequence[str], *, stacked: bool = False) -> Tensor:
        """One tensor, or several of one shape `stacked`."""
        tensors = []
        for name in names:
            if name not in self.file_of:
                raise InputError(
                    f"{self.path} lacks {name}, which the plan's model has",
                    values={"name": name},
                )
            tensors.append(self._open(self.file_of[name]).get_tensor(name))
        return torch.stack(tensors) if stacked else tensors[0]


def load_hf(modules: Iterable[nn.Module], model: ModelSpec, folder: str | Path) -> None:
    """Fill the parameters of these parts of the model from a folder, whole or sharded.

    Raises
    ------
    InputError
        A file or tensor is missing or damaged, or has another shape than the model says.
    """
    family = read_config(folder)["model_type"]
    with ExitStack() as stack:
        source = Folder(folder, stack)
        for module in modules:
            for name, value in named_values(module):
                if name == "head.weight" and model.tie_word_embeddings:
                    full = source.read(theirs("embedding.weight", family, 0))
                else:
                    names = theirs(name, family, experts_of(name, model))
                    full = source.read(names, stacked=is_stack(name))
                if tuple(full.shape) != tuple(value.shape):
                    raise InputError(
                        f"{folder} has {name} as {tuple(full.shape)}, and the plan's model as "
                        f"{tuple(value.shape)}",
                        values={"name": name},
                    )
                assign(value, full.to(value.dtype))


# What each family can hold; `shared` counts a shared expert and its gate.
DENSE_FORMS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": ["none"], "bias": ["none", "all"], "window": [False]},
    "mistral": {"qk_norm": ["none"], "bias": ["none"], "window": [True]},
    "qwen2": {"qk_norm": ["none"], "bias": ["qkv"], "window": [False]},
    "qwen3": {"qk_norm": ["head"], "bias": ["none", "all"], "window": [False]},
}
MOE_FORMS: dict[str, dict[str, Any]] = {
    "mixtral": {"qk_norm": ["none"], "bias": ["none"], "shared": [{0}], "mixed": [False]},
    "qwen2_moe": {"qk_norm": ["none"], "bias": ["qkv"], "window": [False], "shared": [{2}]},
    "qwen3_moe": {
        "qk_norm": ["head"],
        "bias": ["none", "all"],
        "window": [False],
        "shared": [{0}],
    },
}


def family_of(model: ModelSpec) -> str:
    """The family whose files and config can hold a model.

    Raises
    ------
    ModelError
        None of those known here.
    """
    kinds, attention = model.kinds, model.kinds[0].attention
    moes = [kind.moe for kind in kinds if kind.moe is not None]
    dense = [kind.mlp for kind in kinds if kind.mlp is not None]
    usual = (
        (model.norm, model.positions, model.lm_head_bias) == ("rmsnorm", "rotary", False)
        and len({kind.attention for kind in kinds}) == 1
        and all(kind.norms == 2 and not kind.parallel for kind in kinds)
        and all(mlp.gated and not mlp.bias for mlp in dense)
        and all(moe.gated and not moe.router_bias and not moe.aux_free_bias for moe in moes)
    )
    has = {
        "qk_norm": attention.qk_norm,
        "bias": {(False, False): "none", (True, False): "qkv", (True, True): "all"}.get(
            (attention.qkv_bias, attention.out_bias), "out"
        ),
        "window": attention.window is not None,
        "shared": {(moe.shared_intermediate_size > 0) + moe.shared_gate for moe in moes},
        "mixed": bool(moes and dense),
    }
    if usual and attention.kind == "gqa":
        for family, may in (MOE_FORMS if moes else DENSE_FORMS).items():
            if all(has[name] in values for name, values in may.items()):
                return family
    raise ModelError(
        f"{model.name} is no model that Hugging Face's Llama, Qwen2, Qwen3 or Mixtral can hold; "
        "its checkpoints stay in the run's own form",
        values={"model": model.name},
    )


def config_of(model: ModelSpec, details: Details) -> dict[str, Any]:
    """The config.json of a model that was made here."""
    family = family_of(model)
    attention = model.kinds[0].attention
    dense = next((k.mlp for k in model.kinds if k.mlp is not None), None)
    moe = next((k.moe for k in model.kinds if k.moe is not None), None)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_act": dense.activation if dense else "silu",
        "max_position_embeddings": model.max_position_embeddings or 4096,
        "rms_norm_eps": details.norm_eps,
        "rope_theta": details.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": details.initializer_range,
        "sliding_window": attention.window,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if details.rope_scaling is not None:
        scaling = details.rope_scaling
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                config["rope_scaling"][key] = getattr(scaling, key)
    if dense is not None:
        config["intermediate_size"] = dense.intermediate_size
    if family in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = attention.qkv_bias
    if moe is not None:
        config |= moe_config(model, family, details)
    return config


def moe_config(model: ModelSpec, family: str, details: Details) -> dict[str, Any]:
    """The keys of a config that speak of experts."""
    moe = next(k.moe for k in model.kinds if k.moe is not None)
    shared: dict[str, Any] = {
        "num_experts_per_tok": moe.num_experts_per_tok,
        "router_aux_loss_coef": details.aux_loss_coefficient,
    }
    if family == "mixtral":
        sizes = {"num_local_experts": moe.num_experts, "intermediate_size": moe.intermediate_size}
        return shared | sizes
    dense = [i for i, k in enumerate(model.layer_kinds) if model.kinds[k].moe is None]
    shared |= {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": details.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
    if family == "qwen2_moe":
        shared["shared_expert_intermediate_size"] = moe.shared_intermediate_size
    return shared


def whole_values(modules: Iterable[nn.Module], model: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every value of these parts, gathered; all ranks that share them must ask together."""
    for module in modules:
        for name, value in named_values(module):
            if name == "head.weight" and model.tie_word_embeddings:
                continue
            full = value.detach()
            full_tensor = getattr(full, "full_tensor", None)
            yield name, (full if full_tensor is None else full_tensor()).cpu()


def save_hf(
    modules: Sequence[nn.Module],
    model: ModelSpec,
    details: Details,
    folder: str | Path,
    *,
    stage: int = 0,
    is_writer: bool = True,
    config: dict[str, Any] | None = None,
) -> None:
    """Write the model as a Hugging Face folder; all ranks call it together.

    `stage` is the pipeline stage that `modules` are of, and one rank of each stage `is_writer`.
    `config` is that of the folder that the weights came from.

    Raises
    ------
    ModelError
        No family of Hugging Face's that is known here can hold the model.
    InputError
        The folder cannot be written.
    """
    target = Path(folder)
    family = config["model_type"] if config else family_of(model)
    shards = ShardWriter(target, stage) if is_writer else None
    for name, full in whole_values(modules, model):
        if shards is None:
            continue
        names = theirs(name, family, experts_of(name, model))
        for key, value in zip(names, full.unbind() if is_stack(name) else [full], strict=True):
            shards.add(key, value)
    found = shards.finish() if shards is not None else {}
    every: list[Any] = [found]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
    if not dist.is_initialized() or dist.get_rank() == 0:
        files = {key: value for part in every for key, value in part.items()}
        index = {
            "metadata": {"total_size": sum(size for _, size in files.values())},
            "weight_map": {key: file for key, (file, _) in sorted(files.items())},
        }
        write_whole(target / INDEX, json.dumps(index, indent=2) + "\n")
        kept = config if config is not None else config_of(model, details)
        write_whole(target / CONFIG, json.dumps(kept, indent=2) + "\n")


class ShardWriter:
    """Writes tensors into files of a few GiB, each whole or not at all."""

    def __init__(self, folder: Path, stage: int) -> None:
        self.folder = folder
        self.stage = stage
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0
        self.written: dict[str, tuple[str, int]] = {}
        self.count = 0

    def add(self, name: str, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        if self.held and self.held_bytes + size > MAX_FILE_BYTES:
            self.flush()
        self.held[name] = value.contiguous()
        self.held_bytes += size

    def flush(self) -> None:
        from safetensors.torch import save_file

        file = f"model-stage{self.stage:03d}-{self.count:05d}.safetensors"
        temporary = self.folder / f".{file}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(self.held, temporary, metadata={"format": "pt"})
            os.replace(temporary, self.folder / file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            reason = error.strerror or error
            raise InputError(f"cannot write {self.folder / file}: {reason}") from error
        for name, value in self.held.items():
            self.written[name] = (file, value.numel() * value.element_size())
        self.held, self.held_bytes = {}, 0
        self.count += 1

    def finish(self) -> dict[str, tuple[str, int]]:
        """Name of every tensor written -> its file and bytes."""
        if self.held:
            self.flush()
        return self.written
