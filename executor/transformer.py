"""The reference model: a decoder-only transformer as single-device code.

Parts are named by their place in the whole model, whatever stage holds them, so that a checkpoint
of one pipeline split loads into another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.attention import Attention, LatentAttention, RotaryTable
from executor.details import Details, details_of
from executor.moe import Moe
from executor.norms import activation, gated_activation, make_norm
from executor.weights import init_weights
from planner.errors import ModelError
from planner.specs import LayerSpec, MlpSpec, ModelSpec

IGNORED_LABEL = -100


class Mlp(nn.Module):
    """Feed-forward network: down(act(gate x) * up x), or down(act(up x))."""

    def __init__(self, spec: MlpSpec, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        width, bias = spec.intermediate_size, spec.bias
        self.gate = nn.Linear(hidden_size, width, bias=bias, dtype=dtype) if spec.gated else None
        self.up = nn.Linear(hidden_size, width, bias=bias, dtype=dtype)
        self.down = nn.Linear(width, hidden_size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(gated_activation(self.spec.activation, self.gate(x), self.up(x)))
        return self.down(activation(self.spec.activation)(self.up(x)))


class TransformerLayer(nn.Module):
    """Norm, attention, norm, feed-forward, each half added to the residual stream.

    With four norms each half's output is normed too (Gemma-2); a parallel layer feeds both halves
    from the same input, through one norm or two.
    """

    def __init__(
        self,
        spec: LayerSpec,
        model: ModelSpec,
        rotary: RotaryTable | None,
        details: Details,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.parallel = spec.parallel

        def norm() -> nn.Module:
            return make_norm(
                model.norm, hidden, details.norm_eps, bias=model.norm_bias, dtype=dtype
            )

        kind = LatentAttention if spec.attention.kind == "mla" else Attention
        self.input_norm = norm()
        self.attention = kind(spec.attention, hidden, rotary, details, dtype)
        self.post_attention_norm = norm() if spec.norms >= 2 else None
        self.attention_output_norm = norm() if spec.norms == 4 else None
        self.mlp_output_norm = norm() if spec.norms == 4 else None
        self.mlp = None if spec.mlp is None else Mlp(spec.mlp, hidden, dtype)
        self.moe = None
        if spec.moe is not None:
            shared = None
            if spec.moe.shared_intermediate_size:
                width = MlpSpec(spec.moe.shared_intermediate_size, gated=spec.moe.gated)
                shared = Mlp(width, hidden, dtype)
            self.moe = Moe(spec.moe, hidden, shared, details, dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        block = self.mlp if self.mlp is not None else self.moe
        normed = self.input_norm(x)
        attended = self.attention(normed, positions)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        if self.parallel:
            own = normed if self.post_attention_norm is None else self.post_attention_norm(x)
            return x + attended + block(own)
        x = x + attended
        fed = block(self.post_attention_norm(x))
        return x + (fed if self.mlp_output_norm is None else self.mlp_output_norm(fed))


class Transformer(nn.Module):
    """A decoder, or the part of it that one pipeline stage holds.

    Parameters
    ----------
    layers
        Global indices of the layers held here (None: all).
    has_embedding, has_head
        Whether tokens come in, and whether logits go out; else hidden states.
    vocab_size
        Rows of embedding and head, where they are padded (None: the model's own).
    max_seq_len
        Longest sequence, of the whole and not of a context-parallel part.
    details
        What the plan leaves out (None: as a model trained from random weights).

    Raises
    ------
    ModelError
        The model has a part that the executor does not run.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        layers: Sequence[int] | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        vocab_size: int | None = None,
        max_seq_len: int,
        dtype: torch.dtype = torch.float32,
        details: Details | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        self.model = model
        self.details = details if details is not None else details_of(model)
        self.tied = model.tie_word_embeddings and has_embedding and has_head
        hidden = model.hidden_size
        vocab = model.vocab_size if vocab_size is None else vocab_size
        held = range(model.num_hidden_layers) if layers is None else layers
        rotary = None
        if model.positions == "rotary":
            rotary = RotaryTable(rotary_dim(model), max_seq_len, self.details)
        self.embedding = self.position_embedding = self.final_norm = self.head = None
        if model.positions == "learned" and 0 < model.max_position_embeddings < max_seq_len:
            raise ModelError(
                f"{model.name} has {model.max_position_embeddings} learned positions, and its "
                f"sequences have {max_seq_len} tokens",
                values={"seq_len": max_seq_len},
                legal={"seq_len": [model.max_position_embeddings]},
            )
        if has_embedding:
            self.embedding = nn.Embedding(vocab, hidden, dtype=dtype)
            if model.positions == "learned":
                rows = model.max_position_embeddings or max_seq_len
                self.position_embedding = nn.Embedding(rows, hidden, dtype=dtype)
        self.layers = nn.ModuleDict(
            {
                str(index): TransformerLayer(
                    model.kinds[model.layer_kinds[index]], model, rotary, self.details, dtype
                )
                for index in held
            }
        )
        if has_head:
            if model.final_norm:
                eps = self.details.norm_eps
                self.final_norm = make_norm(
                    model.norm, hidden, eps, bias=model.norm_bias, dtype=dtype
                )
            self.head = nn.Linear(hidden, vocab, bias=model.lm_head_bias, dtype=dtype)
            self._tie()

    def _tie(self) -> None:
        if self.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # Moving to another device makes new parameters, one for each module that has it.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [b, s, vocab] of tokens [b, s], or what this part makes of what comes in.

        `positions` [s] are the places of the tokens in their sequence (None: 0 to s - 1).
        """
        if self.embedding is not None:
            tokens = x
            x = self.embedding(tokens)
            if self.position_embedding is not None:
                places = positions
                if places is None:
                    places = torch.arange(tokens.shape[1], device=tokens.device)
                x = x + self.position_embedding(places)
        for layer in self.layers.values():
            x = layer(x, positions)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.head is None else self.head(x)

    def init_weights(self, seed: int) -> None:
        """Fill every parameter; equal names get equal values, whatever stage or rank holds them."""
        init_weights(self, self.model, seed, self.details.initializer_range)

    def moe_layers(self) -> list[Moe]:
        """The mixtures of experts held here."""
        return [module for module in self.modules() if isinstance(module, Moe)]


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over tokens [nats]; tokens labelled -100 do not count."""
    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        reduction="sum",
        ignore_index=IGNORED_LABEL,
    )


def rotary_dim(model: ModelSpec) -> int:
    """Width of the rotated part of a head; one for all layers."""
    widths = {
        kind.attention.qk_rope_head_dim or kind.attention.head_dim
        for kind in model.kinds
        if kind.attention.kind != "none"
    }
    if len(widths) != 1 or next(iter(widths)) % 2:
        raise ModelError(
            f"{model.name} has rotary widths {sorted(widths)}; what runs here is one even width",
            values={"head_dim": sorted(widths)},
        )
    return widths.pop()


def check_model(model: ModelSpec) -> None:
    """Refuse a model with a part that the executor does not have.

    Raises
    ------
    ModelError
        With every such part.
    """
    missing = unsupported_parts(model)
    if missing:
        raise ModelError(
            f"{model.name} cannot be run here, for it has {'; '.join(missing)}; it can be planned",
            values={"model": model.name, "parts": missing},
        )


def unsupported_parts(model: ModelSpec) -> list[str]:
    """What the executor has no code for, in words; empty if it runs the model."""
    found = []
    if model.tower is not None:
        found.append("an encoder tower")
    if model.positions not in ("rotary", "learned", "none"):
        found.append(f"{model.positions} positions")
    if not model.lm_head:
        found.append("no output projection")
    if model.extra_params:
        found.append(model.extra_params_note or "parameters outside of its layers")
    for kind in model.kinds:
        found += [part for part in unsupported_in_layer(kind) if part not in found]
    return found


def unsupported_in_layer(kind: LayerSpec) -> list[str]:
    attention, moe = kind.attention, kind.moe
    rules = [
        (attention.kind not in ("gqa", "mla"), f"{attention.kind} layers"),
        ((kind.mlp is None) == (moe is None), "layers without a feed-forward network, or with two"),
        (kind.norms not in ((1, 2) if kind.parallel else (2, 4)), f"{kind.norms} norms a layer"),
        (attention.sinks, "attention sinks"),
        (attention.gate, "gated attention"),
        (attention.chunked, "chunked attention windows"),
        (attention.index_n_heads > 0, "a sparse-attention indexer"),
        (moe is not None and moe.expert_bias, "biases in its experts"),
        (moe is not None and moe.latent_size > 0, "experts in a latent space"),
    ]
    return [words for applies, words in rules if applies]
