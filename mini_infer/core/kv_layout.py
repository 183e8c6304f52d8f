"""What one token leaves in the cache of one layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a layer's cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    ``has_values`` is False where keys and values are one tensor, as in multi-head latent attention.
    """

    num_kv_heads: int
    head_dim: int
    has_values: bool = True

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes that one token takes in one layer, at ``element_size`` bytes a number."""
        planes = 2 if self.has_values else 1
        return planes * self.num_kv_heads * self.head_dim * element_size
