"""A byte-level transformer with Multi-head Latent Attention, as DeepSeek-V2 defines it
(arXiv 2405.04434, section 2.1), and with a draft head for each of the next positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..layout import KVLayout
from ..reference import MLAWeights


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes; the names are those of a DeepSeek config.json. A cache row has the true 512 + 64,
    everything else is small.

    Args:
        num_draft_heads: positions that are drafted after the root, in one pass.
    """

    num_hidden_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    intermediate_size: int = 640
    vocab_size: int = 256
    num_draft_heads: int = 7
    rope_theta: float = 10000.0

    @property
    def sm_scale(self) -> float:
        """Of the un-absorbed head width, which absorption does not change."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

    def layout(self, order: str) -> KVLayout:
        return KVLayout(order, self.kv_lora_rank, self.qk_rope_head_dim)


#: Given a layer, its queries (latent ``[n, H, kv_lora_rank]`` and rotary ``[n, H,
#: qk_rope_head_dim]``) and the new rows' parts (``[n, kv_lora_rank]``, ``[n,
#: qk_rope_head_dim]``): the attention's result ``[n, H, kv_lora_rank]``.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of pairs ``(i, i + d / 2)`` (RoFormer, arXiv 2104.09864).

    Args:
        x: ``[..., n, d]``; positions: ``[n]``.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions[:, None].double() * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to its input."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.attention_norm = nn.RMSNorm(c.hidden_size)
        self.q_a = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(c.q_lora_rank)
        self.q_b = nn.Linear(c.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a = nn.Linear(c.hidden_size, c.kv_lora_rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(c.kv_lora_rank)
        self.w_uk = nn.Parameter(torch.randn(heads, nope, c.kv_lora_rank) * c.kv_lora_rank**-0.5)
        self.w_uv = nn.Parameter(
            torch.randn(heads, c.v_head_dim, c.kv_lora_rank) * c.kv_lora_rank**-0.5)
        self.o = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(c.hidden_size)
        self.gate = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        for last in (self.o, self.down):
            nn.init.normal_(last.weight, std=0.02 / (2 * c.num_hidden_layers) ** 0.5)

    def parts(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``q_nope``, ``q_rope`` ``[..., n, H, *]`` and a row's ``latent``, ``rope`` ``[..., n,
        *]`` of hidden states ``[..., n, hidden_size]``."""
        c = self.config
        x = self.attention_norm(x)
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (c.num_attention_heads, -1))
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_rope = rotate(q_rope.transpose(-3, -2), positions, c.rope_theta).transpose(-3, -2)
        latent, rope = self.kv_a(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        return q_nope, q_rope, self.kv_norm(latent), rotate(rope, positions, c.rope_theta)

    def after(self, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """The layer's output, given the heads' values ``[..., n, H, v_head_dim]``."""
        x = x + self.o(heads.flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class MLATransformer(nn.Module):
    """
    Args:
        config: sizes.
    """

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = c = config or ModelConfig()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size)
        self.drafts = nn.ModuleList(nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
                                    for _ in range(c.num_draft_heads))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[B, S, hidden_size]`` of whole texts ``[B, S]``: every head expands
        the latent to its own keys and values, as in training."""
        c = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            q_nope, q_rope, latent, rope = layer.parts(x, positions)
            k_nope = torch.einsum("bsr,hnr->bshn", latent, layer.w_uk)
            value = torch.einsum("bsr,hvr->bhsv", latent, layer.w_uv)
            key = torch.cat([k_nope, rope[:, :, None].expand_as(q_rope)], dim=-1)
            heads = F.scaled_dot_product_attention(
                torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2), key.transpose(1, 2), value,
                is_causal=True, scale=c.sm_scale)
            x = layer.after(x, heads.transpose(1, 2))
        return self.norm(x)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states ``[n, hidden_size]`` of new tokens ``[n]`` at positions ``[n]``, in
        absorbed form over a cache that ``attend`` keeps."""
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            q_nope, q_rope, latent, rope = layer.parts(x, positions)
            weights = MLAWeights(layer.w_uk, layer.w_uv)
            out = attend(i, weights.absorb_query(q_nope), q_rope, latent, rope)
            x = layer.after(x, weights.project_output(out))
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., vocab_size]`` of the next token."""
        return hidden @ self.embedding.weight.T

    def draft_logits(self, hidden: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """``[..., num_draft_heads, vocab_size]`` of the tokens after ``root``: for each position
        a residual block and the shared unembedding, as Medusa's heads (arXiv 2401.10774), which
        here see the root too, as a block drafter's do.

        Args:
            hidden: ``[..., hidden_size]`` of the last accepted token.
            root: ``[...]`` the token that the model chose after it.
        """
        seen = torch.cat([hidden, self.embedding(root)], dim=-1)
        return torch.stack([self.logits(hidden + F.silu(head(seen))) for head in self.drafts],
                           dim=-2)
