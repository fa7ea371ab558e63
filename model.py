"""The decoder, whole: the Qwen3 block, which is also MiniMind-3's.

Read it top to bottom; things stand in the order in which a token meets them:
  1. GPTConfig           the shape of a model, with the field names of a Qwen3 config.json
  2. AttentionPlan       who may look at whom: decided once per forward, here and nowhere else
  3. attend              attention itself, by torch's kernels and in the open
  4. RMSNorm, Attention, MLP, Block, Decoder
  5. GPT                 initialisation, forward with its loss, decode_step, checkpoints

Four things have a file of their own: where a token is (rope.py), what is remembered of the tokens
so far (kv_cache.py), the loss that never holds all the logits (loss.py), files (pretrained.py).

Letters in shape comments: B rows, T new tokens, S keys (past + new), C hidden_size, H query heads,
K key/value heads, G = H / K query heads per key/value head, D head_dim, V vocab_size.
"""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pretrained
from kv_cache import KVCache
from loss import LinearCrossEntropy
from rope import rope_tables, rotate

# ------------------------------------------------------------------------------------ the shape


@dataclass
class GPTConfig:
    """The shape of a model. Names and meaning are those of a Qwen3 `config.json`.

    Raises ValueError, naming the fields and their values, for a shape that cannot be built.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None  # None: as many as query heads (MHA); 1 is MQA
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 32768  # the context limit, in tokens
    rope_theta: float = 1e6
    rope_scaling: dict | None = None  # None, or YaRN's {"rope_type": "yarn", "factor": ...}
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    dropout: float = 0.0  # ours: not in Qwen3
    attention: str = "sdpa"  # ours: "sdpa" (torch's fused kernels) or "manual" (readable)

    def __post_init__(self):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, int | None) and value is not None:
                if type(value) is not int or value < 1:
                    raise ValueError(f"{field.name} must be a whole number above 0, not {value!r}")
            if field.type is float and not isinstance(value, int | float):
                raise ValueError(f"{field.name} must be a number, not {value!r}")
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: RoPE rotates pairs")
        if self.attention not in ("sdpa", "manual"):
            raise ValueError(f'attention must be "sdpa" or "manual", not {self.attention!r}')
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout ({self.dropout}) must be at least 0 and below 1")
        if self.rope_scaling is not None:
            rope_type = self.rope_scaling.get("rope_type", self.rope_scaling.get("type"))
            if rope_type != "yarn":
                raise ValueError(f"rope_scaling: type {rope_type!r} is not known, only 'yarn' is")
            if not isinstance(self.rope_scaling.get("factor"), int | float):
                raise ValueError("rope_scaling needs a number for 'factor'")

    @classmethod
    def from_dict(cls, config: dict) -> "GPTConfig":
        """The shape in a Hugging Face `config.json`; ValueError for another architecture."""
        return cls(**pretrained.decoder_fields(config, [field.name for field in fields(cls)]))


# --------------------------------------------------------------- who may look at whom


@dataclass
class AttentionPlan:
    """What every layer of one forward needs to know. Made once, above the layers.

    One rule makes all masks: a query at position p sees a key at position q if and only if q <= p
    and the key is a real token. Positions count real tokens, so the rule is the same for padding on
    either side, for a cache, and for several new tokens behind a past.
      - Right padding without a mask is already right: pads stand behind every real token, so no
        real query can see one; and their own outputs are never read (labels there are -100).
      - Left padding needs the mask: pads stand before the real tokens, where these would see them.
    """

    cos: Tensor  # (B or 1, 1, T, D/2) fp32
    sin: Tensor
    visible: Tensor | None = None  # (B, 1, T, S) bool, True: may look. None: no mask is needed
    blind: Tensor | None = None  # (B, 1, T, 1) bool, True: sees nothing. None: there is no such
    is_causal: bool = False  # S == T, and the mask is the plain triangle that SDPA knows itself
    cache: KVCache | None = None
    slots: Tensor | None = None  # (T,) where the new keys go
    num_keys: int = 0  # S, how many slots the queries read
    weights: list[Tensor] | None = None  # attention_weights() collects here


def plan_attention(
    config: GPTConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: KVCache | None,
    keep_weights: bool = False,
) -> AttentionPlan:
    """Choose the path from shapes and flags alone, on the host: looking at a mask's values here
    (`mask.all()`) would make a GPU wait. The four cases:

    1. no mask, empty cache:                SDPA's own causal triangle
    2. one new token a row, no padding:     no mask, every cached key is visible
    3. a decode step of fixed shape:        GPT.decode_step plans that itself
    4. anything else, and "manual":         a boolean mask from positions, shared by all layers
    """
    B, T = input_ids.shape
    device = input_ids.device
    past = cache.length if cache is not None else 0
    if T == 0:
        raise ValueError("input_ids is empty: its shape is (B, T) with T of at least 1")
    if attention_mask is not None and attention_mask.shape != (B, past + T):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but input_ids {(B, T)} "
            f"behind {past} cached tokens need {(B, past + T)}"
        )
    slots = None
    if cache is not None:
        cache.check_room(B, T)
        slots = torch.arange(past, past + T, device=device)
        cache.padded = cache.padded or attention_mask is not None
        if attention_mask is not None:
            cache.real[:, : past + T] = attention_mask.bool()
        else:
            cache.real[:, past : past + T] = True
        cache.row_lengths.copy_(cache.real.sum(dim=1))
        cache.length = past + T

    padded = attention_mask is not None or (cache is not None and cache.padded)
    if padded:
        real = cache.real[:, : past + T] if cache is not None else attention_mask.bool()
        key_positions = real.cumsum(dim=1) - real.long()  # (B, S): real tokens before each slot
    else:
        real = None
        key_positions = torch.arange(past + T, device=device)[None]  # (1, S)
    positions = key_positions[:, past:]  # (B or 1, T)
    cos, sin = rope_tables(config, positions)

    plan = AttentionPlan(cos, sin, cache=cache, slots=slots, num_keys=past + T)
    plan.weights = [] if keep_weights else None
    explicit = padded or keep_weights or config.attention == "manual"
    plan.is_causal = past == 0 and not explicit
    if explicit or (past > 0 and T > 1):
        plan.visible = key_positions[:, None, None, :] <= positions[:, None, :, None]  # (B,1,T,S)
    if padded:
        plan.visible, plan.blind = open_blind(plan.visible & real[:, None, None, :])
    return plan


def open_blind(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Let each query that sees nothing look everywhere, and say which they are: (B, 1, T, 1) bool.

    Kernels differ in what softmax over no keys gives (zeros, NaN). So such a query looks at every
    key, and attend() sets its output to zero: no large negative number has to stand for minus
    infinity.
    """
    blind = ~visible.any(dim=-1, keepdim=True)
    return visible | blind, blind


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attention by torch's fused kernels. q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D).

    Query head h reads key/value head h // G.
    """
    B, H, T, D = q.shape
    K = k.shape[1]
    if q.is_cpu and q.dtype != torch.float32 and q.requires_grad and T * D < 2**14:
        # On a CPU, for narrow heads in short rows, bf16's backward takes up to 2.4 times as long.
        with torch.autocast("cpu", enabled=False):
            return attend(q.float(), k.float(), v.float(), plan, dropout).type_as(q)
    if T == 1 and dropout == 0:
        # The G heads of a group ask the same keys: as G queries of one head, nothing is repeated.
        q = q.reshape(B, K, H // K, D)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.visible)
        out = out.reshape(B, H, 1, D)
    else:
        if plan.visible is not None and q.is_cuda and H != K:
            # With a mask, enable_gqa would fall back to the slow math kernel on CUDA.
            k = k.repeat_interleave(H // K, dim=1)
            v = v.repeat_interleave(H // K, dim=1)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=plan.visible,
            dropout_p=dropout,
            is_causal=plan.is_causal,
            enable_gqa=k.shape[1] != H,
        )
    return out if plan.blind is None else out.masked_fill(plan.blind, 0)


def attend_manually(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float
) -> tuple[Tensor, Tensor]:
    """The same in the open: Vaswani et al. 2017, equation 1. Also returns the weights (B, H, T, S).

    Why 1 / sqrt(D): the dot product of two random vectors of D unit-variance entries has variance
    D; unscaled, softmax would start out saturated, with no gradient.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    q = q.reshape(B, K, H // K, T, D)  # (B, K, G, T, D): each group beside its key/value head
    q = q / math.sqrt(D)  # before the product, which could pass 65,504, the largest fp16 number
    scores = q @ k[:, :, None].transpose(-2, -1)  # (B, K, G, T, S)
    scores = scores.float().masked_fill(~plan.visible[:, :, None], float("-inf"))
    weights = scores.softmax(dim=-1).reshape(B, H, T, S)
    if plan.blind is not None:
        weights = weights.masked_fill(plan.blind, 0)
    dropped = F.dropout(weights, dropout).to(v.dtype).reshape(B, K, H // K, T, S)
    out = dropped @ v[:, :, None]  # (B, K, G, T, D)
    return out.reshape(B, H, T, D), weights


# ------------------------------------------------------------------------------ the layers


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 whatever the dtype of x (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        # The same as wide.pow(2).mean(), but in one pass and with a backward of two.
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).type_as(x)


class Linear(nn.Linear):
    """A matrix product, (..., inputs) -> (..., outputs), by the right kernel for its rows.

    With one row, as in decoding, the time is that of reading the weights: decode.py has more.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() == 1 and x.device.type == "cpu" and not self.training:
            # On CPUs this reads them faster than a matrix product does.
            out = torch.addmv(x.new_empty(len(self.weight)), self.weight, x.flatten(), beta=0)
            return out.view(*x.shape[:-1], -1)
        return F.linear(x, self.weight)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with QK-Norm (Henry et al. 2020) and RoPE.

    QK-Norm keeps the scores' scale in hand: without it, q and k can grow during training until
    softmax saturates. It stands before RoPE. A rotation leaves the rms alone, so the two orders
    would be the same function as long as the norm's weight is equal within each rotated pair; a
    trained weight is not, so the order is part of the checkpoint format.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer = layer
        C, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = Linear(C, H * D)
        self.k_proj = Linear(C, K * D)
        self.v_proj = Linear(C, K * D)
        self.o_proj = Linear(H * D, C)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        B, T, _ = x.shape
        D = self.config.head_dim
        dropout = self.config.dropout if self.training else 0.0
        q = self.q_norm(self.q_proj(x).view(B, T, -1, D)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, D)).transpose(1, 2)  # (B, K, T, D)
        v = self.v_proj(x).view(B, T, -1, D).transpose(1, 2)  # (B, K, T, D)
        q = rotate(q, plan.cos, plan.sin)
        k = rotate(k, plan.cos, plan.sin)
        if plan.cache is not None:
            k, v = plan.cache.update(self.layer, k, v, plan.slots, plan.num_keys)  # (B, K, S, D)
        if self.config.attention == "manual" or plan.weights is not None:
            out, weights = attend_manually(q, k, v, plan, dropout)
            if plan.weights is not None:
                plan.weights.append(weights)
        else:
            out = attend(q, k, v, plan, dropout)
        out = out.transpose(1, 2).reshape(B, T, -1)  # (B, T, H * D)
        return F.dropout(self.o_proj(out), dropout, self.training)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): a gate decides, entry by entry, what of `up` passes."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm: each half reads a normed copy of the stream and adds its answer to the stream."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), plan)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Decoder(nn.Module):
    """Embedding, blocks, final norm: (B, T) ids -> (B, T, C). Called `model` in the checkpoint."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute_activations = False  # trade a second forward for the memory of the first

    def forward(self, input_ids: Tensor, plan: AttentionPlan) -> Tensor:
        x = self.embed_tokens(input_ids)  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            if self.recompute_activations and self.training:
                x = checkpoint(layer, x, plan, use_reentrant=False)
            else:
                x = layer(x, plan)
        return self.norm(x)


# --------------------------------------------------------------------------------- the model


class GPT(nn.Module):
    """The language model: a Decoder and the head that turns its output into logits."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tie_weights()
        self.init_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give every parameter its first value. Also to be called after meta-device `to_empty`.

        | parameter         | standard deviation      | why                                   |
        | ----------------- | ----------------------- | ------------------------------------- |
        | norms             | 0: all are 1            | start as plain normalisation          |
        | embedding, head   | 0.02, or 0.4/sqrt(C)    | the logits' is then at most 0.4, and  |
        |                   | where that is less      | the loss ln V + 0.4**2 / 2, or 0.08   |
        | q k v gate up     | 1/sqrt(inputs)          | keeps unit variance                   |
        | o_proj, down_proj | that / sqrt(2 * layers) | the stream sums 2 * layers of these   |

        Zero for o_proj and down_proj, a common choice, is wrong with tied embeddings: the stream
        would be the token's own embedding, its logit with itself |e| * sqrt(C) = 0.02 * C, and the
        first loss far above ln V.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, min(0.02, 0.4 * parameter.shape[1] ** -0.5))
            else:
                std = parameter.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    std /= math.sqrt(2 * self.config.num_hidden_layers)
                parameter.normal_(0.0, std)

    def num_parameters(self) -> int:
        """Weights in the checkpoint; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int | None = None,
        soft_labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or with labels the loss.

        input_ids       (B, T) int64
        labels          (B, T) int64, aligned with input_ids and shifted here; -100 is not counted
        attention_mask  (B, past + T), 1 real and 0 padding, on either side; None: all real
        cache           appended to, T slots in every row
        logits_to_keep  only the last so many positions' logits; None: all
        soft_labels     (B, T, V) fp32, beside labels: where one counts, the distribution that is
                        the target instead of that token alone (Hinton et al. 2015)

        Returns logits (B, T or logits_to_keep, V) in the model's dtype. With labels: the sum of the
        losses, () fp32, and the number of targets, () int64. The sum, so that the caller can divide
        by the targets of a whole step, over micro-batches and ranks. A target is counted only where
        its query is a real token too: a pad before a left-padded row predicts nothing.

        Raises ValueError for a mask of another shape and for a cache without room.
        """
        plan = plan_attention(self.config, input_ids, attention_mask, cache)
        hidden = self.model(input_ids, plan)  # (B, T, C)
        if labels is None:
            if logits_to_keep is not None:
                hidden = hidden[:, -logits_to_keep:]
            return self.lm_head(hidden)  # (B, T, V)
        targets = labels[:, 1:]  # (B, T - 1): position t is asked for token t + 1
        if attention_mask is not None:
            query_is_real = attention_mask[:, -input_ids.shape[1] : -1].bool()
            targets = targets.masked_fill(~query_is_real, -100)
        targets = targets.flatten()  # (N,)
        hidden = hidden[:, :-1].flatten(0, 1)  # (N, C)
        soft = None if soft_labels is None else soft_labels[:, 1:].flatten(0, 1)  # (N, V)
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            # Positions without a target need no logits. A GPU would have to wait to count them.
            counted = targets != -100
            hidden, targets = hidden[counted], targets[counted]
            soft = None if soft is None else soft[counted]
        needs_grad = torch.is_grad_enabled()
        loss_sum = LinearCrossEntropy.apply(hidden, self.lm_head.weight, targets, soft, needs_grad)
        return loss_sum, (targets != -100).sum()

    def decode_step(self, input_ids: Tensor, cache: KVCache, slot: Tensor, num_keys: int) -> Tensor:
        """One token a row, in a fixed shape: for torch.compile and CUDA graphs. -> (B, 1, V)

        `slot` (1,) int64 is where the token goes, as a tensor, so that one compiled graph serves
        every position; `num_keys` is cache.capacity(slot + 1), so that a short row reads only a
        small part of a large cache. The caller counts: `cache.length += 1` after each step.
        Bytes moved: the weights, and num_keys slots of the cache.
        """
        cache.real.index_fill_(1, slot, True)
        positions = cache.row_lengths[:, None]  # (B, 1)
        cos, sin = rope_tables(self.config, positions)
        cache.row_lengths += 1
        # All cached tokens lie before this one; slots not yet written are not real.
        visible = cache.real[:, None, None, :num_keys]  # (B, 1, 1, S)
        plan = AttentionPlan(cos, sin, visible, cache=cache, slots=slot, num_keys=num_keys)
        return self.lm_head(self.model(input_ids, plan))

    @torch.no_grad()
    def attention_weights(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Each layer's attention weights, (B, H, T, T) fp32: who looks at whom, and how much."""
        plan = plan_attention(self.config, input_ids, attention_mask, None, keep_weights=True)
        self.model(input_ids, plan)
        return plan.weights

    # ------------------------------------------------------------------------ checkpoints

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors`: a Hugging Face model directory."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        pretrained.write(Path(directory), asdict(self.config), tensors)  # a tied head once

    @classmethod
    def from_pretrained(
        cls,
        directory_or_hub_id: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "GPT":
        """Read a Hugging Face directory of a dense Qwen3 or MiniMind-3; dtype None: as stored.

        Raises FileNotFoundError where there is no checkpoint, and ValueError, naming the file and
        the field or tensor, for another architecture, for a missing, extra or misshapen tensor, and
        for a file that is cut short. See pretrained.py.
        """
        directory = pretrained.local_directory(directory_or_hub_id)
        config = pretrained.read_config(directory, GPTConfig.from_dict)
        with torch.device("meta"):  # shapes without memory
            model = cls(config)
        expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        tensors = pretrained.read(directory, expected, device, dtype)
        model.load_state_dict(tensors, assign=True, strict=False)  # `read` has compared the names
        model.tie_weights()
        return model.requires_grad_().eval()
