"""What the decoder remembers of the tokens so far: their keys and values, written once.

`update` is what a layer calls; the rest is for the one who generates: make room, truncate for the
next turn of a chat, keep some rows and drop the others. Letters in shapes as in model.py.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from model import GPTConfig  # which imports this file


class KVCache:
    """Keys (after RoPE) and values of the tokens so far, preallocated, heads not repeated.

    Size: 2 * layers * K * D * bytes per token and row. Every call to the model fills the next T
    slots of every row; `real` says which slots hold tokens and not padding, so rows may differ in
    length. A decode step moves the weights once and the visible slots once; it neither
    concatenates nor copies what is already there. No gradient flows through the cache.
    """

    def __init__(
        self,
        config: "GPTConfig",
        batch_size: int,
        max_length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        shape = (batch_size, config.num_key_value_heads, max_length, config.head_dim)
        self.keys, self.values = room(config.num_hidden_layers, shape, device, dtype)
        self.real = torch.zeros(batch_size, max_length, device=device, dtype=torch.bool)
        self.row_lengths = torch.zeros(batch_size, device=device, dtype=torch.long)  # real tokens
        self.length = 0  # slots filled, the same in every row; a host number: reading it is free
        self.max_length = max_length
        self.padded = False  # whether any row may hold padding

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    def capacity(self, length: int) -> int:
        """The smallest of a few sizes (256, 512, 1024, ..., max_length) that holds `length`."""
        if length > self.max_length:
            self.check_room(len(self.real), length - self.length)
        size = 256
        while size < length:
            size *= 2
        return min(size, self.max_length)

    def check_room(self, rows: int, new: int) -> None:
        if rows != len(self.real):
            raise ValueError(f"the cache was made for {len(self.real)} rows, but there are {rows}")
        if self.length + new > self.max_length:
            raise ValueError(
                f"the cache holds {self.length} of at most {self.max_length} tokens a row: "
                f"there is no room for {new} more; give KVCache a larger max_length"
            )

    def update(
        self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, num_keys: int
    ) -> tuple[Tensor, Tensor]:
        """Write (B, K, T, D) at `slots` (T,); return views (B, K, num_keys, D) of what is there."""
        past_keys, past_values = self.keys[layer], self.values[layer]  # (B, K, max_length, D)
        past_keys.index_copy_(2, slots, keys.detach().to(past_keys.dtype))
        past_values.index_copy_(2, slots, values.detach().to(past_values.dtype))
        return past_keys[:, :, :num_keys], past_values[:, :, :num_keys]

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on: for the next turn of a chat, or for another try."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.real[:, length:] = False
        self.row_lengths.copy_(self.real.sum(dim=1))  # in place: a CUDA graph keeps the address
        self.length = length
        self.padded = self.padded and length > 0

    def reset(self) -> None:
        self.truncate(0)

    def copy_to(self, larger: "KVCache") -> None:
        """Copy all slots into an empty cache of as many rows and at least this length."""
        slots = slice(0, self.length)
        for old, new in zip(self.keys + self.values, larger.keys + larger.values, strict=True):
            new[:, :, slots] = old[:, :, slots]
        larger.real[:, slots] = self.real[:, slots]
        larger.row_lengths.copy_(self.row_lengths)
        larger.length, larger.padded = self.length, self.padded

    def select_rows(self, rows: Tensor) -> None:
        """Keep only `rows` (indices), in that order; an index given twice copies its row.

        Fewer rows stay where they are in memory, more move to a larger place.
        """
        old, used, new = self.keys + self.values, slice(0, self.length), slice(0, len(rows))
        if len(rows) > len(self.real):
            shape = (len(rows), *old[0].shape[1:])
            self.keys, self.values = room(len(self.keys), shape, old[0].device, old[0].dtype)
        self.keys = [tensor[new] for tensor in self.keys]
        self.values = [tensor[new] for tensor in self.values]
        for before, after in zip(old, self.keys + self.values, strict=True):
            after[:, :, used] = before[rows, :, used]
        self.real, self.row_lengths = self.real[rows], self.row_lengths[rows]


def room(
    layers: int, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Zeros for the keys and the values of each layer.

    On a CPU one block for all, which then lies in pages of 2 MiB (decode.pack says why). On others
    one tensor a layer: of a block, torch.compile would copy the whole to write a slot.
    """
    if torch.device(device).type == "cpu":
        block = torch.zeros((2, layers, *shape), device=device, dtype=dtype)
        return list(block[0]), list(block[1])
    tensors = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2 * layers)]
    return tensors[:layers], tensors[layers:]
