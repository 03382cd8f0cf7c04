"""Self-attention on one device: grouped-query and latent, with rotary positions.

The kernel is the attribute `core`, so that context parallelism can put its own in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.details import Details, RopeScaling
from executor.norms import RmsNorm
from planner.specs import AttentionSpec

Core = Callable[..., Tensor]


def core_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of [b, heads, s, d]; k and v may have fewer heads.

    A row attends to itself and, with `window`, to the ``window - 1`` rows before it.
    """
    if v.shape[-1] < q.shape[-1] and q.device.type == "cpu":
        # The fused kernel of the CPU wants one width; without it all scores would be kept.
        wide = functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return core_attention(q, k, wide, causal=causal, window=window)[..., : v.shape[-1]]
    shared = q.shape[1] != k.shape[1]
    if window is None or (causal and window >= q.shape[2]):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
    if shared and q.device.type == "cuda":  # kernels with a mask want as many heads
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        shared = False
    mask = window_mask(q.shape[2], window, causal=causal, device=q.device)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared)


def window_mask(length: int, window: int, *, causal: bool, device: torch.device) -> Tensor:
    """True where a row may look: at most ``window - 1`` rows back, and forward if not causal."""
    rows = torch.arange(length, device=device)
    back = rows[:, None] - rows[None, :]
    if causal:
        return (back >= 0) & (back < window)
    return back.abs() < window


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each pair of a rotary head, theta^(-2i / dim), stretched by `scaling`.

    ``llama3`` leaves wavelengths below ``original / high`` alone, divides those above
    ``original / low`` by `factor`, and blends in between.
    """
    angles = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if scaling is None:
        return angles
    if scaling.kind == "linear":
        return angles / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * angles / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * angles / scaling.factor + share * angles


class RotaryTable:
    """Cosine and sine by position, made once a device; no part of the model's state.

    It is an object of its own because the layers share it, and because as a tensor argument or a
    buffer it would be cast with the activations.
    """

    def __init__(self, dim: int, max_seq_len: int, details: Details) -> None:
        self.dim = dim
        self.max_seq_len = max_seq_len
        self.details = details
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._gathered: tuple[Tensor, Tensor, Tensor] | None = None

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            scaling = self.details.rope_scaling
            angles = inverse_frequencies(self.dim, self.details.rope_theta, scaling).to(device)
            rows = torch.arange(self.max_seq_len, dtype=torch.float32, device=device)
            phase = rows[:, None] * angles[None, :]
            self._tables[device] = (phase.cos(), phase.sin())
        return self._tables[device]

    def at(self, positions: Tensor | None, length: int, device: torch.device) -> tuple[Any, Any]:
        """Cosine and sine [s, 1, dim / 2] of the rows' positions; None: 0 to length - 1."""
        cos, sin = self._table(device)
        if positions is None:
            return cos[:length, None], sin[:length, None]
        # All layers of a forward pass share the tensor of positions.
        if self._gathered is None or self._gathered[0] is not positions:
            self._gathered = (positions, cos[positions][..., None, :], sin[positions][..., None, :])
        return self._gathered[1:]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of x [b, s, heads, d] by their angle, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head, grouped-query and multi-query attention.

    Heads are counted from the width of the projections, which tensor parallelism splits.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        rotary: RotaryTable | None,
        details: Details,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.rotary = rotary
        self.core: Core = core_attention
        q_width = spec.num_attention_heads * spec.head_dim
        k_width = spec.num_key_value_heads * spec.head_dim
        v_width = spec.num_key_value_heads * spec.v_dim
        self.q = nn.Linear(hidden_size, q_width, bias=spec.qkv_bias, dtype=dtype)
        self.k = nn.Linear(hidden_size, k_width, bias=spec.qkv_bias, dtype=dtype)
        self.v = nn.Linear(hidden_size, v_width, bias=spec.qkv_bias, dtype=dtype)
        out_width = spec.num_attention_heads * spec.v_dim
        self.out = nn.Linear(out_width, hidden_size, bias=spec.out_bias, dtype=dtype)
        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            whole = spec.qk_norm == "full"
            self.q_norm = RmsNorm(q_width if whole else spec.head_dim, details.norm_eps, dtype)
            self.k_norm = RmsNorm(k_width if whole else spec.head_dim, details.norm_eps, dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        spec = self.spec
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None and spec.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (-1, spec.head_dim))
        k = k.unflatten(-1, (-1, spec.head_dim))
        v = v.unflatten(-1, (-1, spec.v_dim))
        if self.q_norm is not None and self.k_norm is not None and spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            cos, sin = self.rotary.at(positions, q.shape[1], q.device)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.out(attend(self.core, q, k, v, spec))


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values grow from narrow latents.

    Of every key's head_dim the last `qk_rope_head_dim` come straight from the input, are rotated
    and shared by all heads.

    References: DeepSeekV2.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        rotary: RotaryTable | None,
        details: Details,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.rotary = rotary
        self.core: Core = core_attention
        heads, eps = spec.num_attention_heads, details.norm_eps
        nope = spec.head_dim - spec.qk_rope_head_dim
        if spec.q_lora_rank:
            rank = spec.q_lora_rank
            self.q_down = nn.Linear(hidden_size, rank, bias=spec.qkv_bias, dtype=dtype)
            self.q_latent_norm = RmsNorm(rank, eps, dtype)
            self.q = nn.Linear(rank, heads * spec.head_dim, bias=False, dtype=dtype)
        else:
            self.q = nn.Linear(hidden_size, heads * spec.head_dim, bias=False, dtype=dtype)
        down = spec.kv_lora_rank + spec.qk_rope_head_dim
        self.kv_down = nn.Linear(hidden_size, down, bias=spec.qkv_bias, dtype=dtype)
        self.kv_latent_norm = RmsNorm(spec.kv_lora_rank, eps, dtype)
        up = heads * (nope + spec.v_dim)
        self.kv = nn.Linear(spec.kv_lora_rank, up, bias=False, dtype=dtype)
        self.out = nn.Linear(heads * spec.v_dim, hidden_size, bias=spec.out_bias, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        spec = self.spec
        nope = spec.head_dim - spec.qk_rope_head_dim
        q = self.q(self.q_latent_norm(self.q_down(x)) if spec.q_lora_rank else x)
        q = q.unflatten(-1, (-1, spec.head_dim))
        latent, k_rope = self.kv_down(x).split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
        up = self.kv(self.kv_latent_norm(latent)).unflatten(-1, (-1, nope + spec.v_dim))
        k_nope, v = up.split([nope, spec.v_dim], -1)
        k_rope = k_rope.unsqueeze(2)
        if self.rotary is not None:
            cos, sin = self.rotary.at(positions, q.shape[1], q.device)
            q_nope, q_rope = q.split([nope, spec.qk_rope_head_dim], -1)
            q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1)
            k_rope = rotate(k_rope, cos, sin)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), -1)
        return self.out(attend(self.core, q, k, v, spec))


def attend(core: Core, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Run the kernel on [b, s, heads, d] and lay the heads side by side again."""
    out = core(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        causal=spec.causal,
        window=spec.window,
    )
    return out.transpose(1, 2).flatten(2)
