"""Runs a model over a paged cache, for tests: any chunking, any mixture of requests."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.causal_lm import CausalLM

POISON = 1e4
"""What unwritten KV holds: any weight on it would show.

Finite, as a real cache always is: a batched attention multiplies what it masks by zero.
"""


class PagedDriver:
    """Feeds chunks to a model; blocks are handed out in a scrambled order, as after long use.

    The caches start poisoned, so that reading a slot that no token wrote shows at once.
    """

    def __init__(self, model: CausalLM, block_size: int = 4, num_blocks: int = 128) -> None:
        self.model = model
        self.block_size = block_size
        layout = model.kv_layout
        shape = (num_blocks, block_size, layout.num_kv_heads, layout.head_dim)
        self.caches = [
            (torch.full(shape, POISON), torch.full(shape, POISON))
            for _ in range(model.config.num_layers)
        ]
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(
        self, chunks: Sequence[tuple[str, Sequence[int]]], last_only: bool = False
    ) -> list[Tensor]:
        """One step over (request, its next tokens). Returns each chunk's logits ``[n, vocab]``, or
        ``[1, vocab]`` of its last token where the model is asked for no others."""
        positions, slots, contexts = [], [], []
        for request, tokens in chunks:
            table = self.tables.setdefault(request, [])
            begin = self.lengths.get(request, 0)
            end = self.lengths[request] = begin + len(tokens)
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            for position in range(begin, end):
                positions.append(position)
                block, offset = divmod(position, self.block_size)
                slots.append(table[block] * self.block_size + offset)
            contexts.append(end)
        query_lens = [len(tokens) for _, tokens in chunks]
        meta = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seqlens_k=torch.tensor(contexts).int(),
            block_table=self._block_table([request for request, _ in chunks]),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(query_lens),
            max_seqlen_k=max(contexts),
            query_lens=tuple(query_lens),
            context_lens=tuple(contexts),
        )
        token_ids = torch.tensor([token for _, tokens in chunks for token in tokens])
        wanted = meta.last_tokens() if last_only else None
        hidden = self.model(token_ids, torch.tensor(positions), self.caches, meta, wanted)
        logits = self.model.compute_logits(hidden)
        return list(logits.split(1 if last_only else query_lens))

    def prefill(self, request: str, tokens: Sequence[int], chunk_size: int) -> Tensor:
        """Feeds ``tokens`` in chunks. Returns the logits of them all ``[n, vocab]``."""
        pieces = [tokens[i : i + chunk_size] for i in range(0, len(tokens), chunk_size)]
        return torch.cat([self.step([(request, piece)])[0] for piece in pieces])

    def greedy(self, prompt: Sequence[int], num_tokens: int, chunk_size: int = 1024) -> list[int]:
        """The ``num_tokens`` likeliest next tokens, one after another."""
        request = f"greedy-{len(self.tables)}"
        logits = self.prefill(request, prompt, chunk_size)
        output = [int(logits[-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.step([(request, output[-1:])])[0][-1].argmax()))
        return output

    def _block_table(self, requests: list[str]) -> Tensor:
        width = max(len(self.tables[request]) for request in requests)
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        for row, request in enumerate(requests):
            blocks = self.tables[request]
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return table
