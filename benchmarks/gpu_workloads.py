"""The requests of the GPU benchmarks. Token ids are random: speed does not depend on them."""

import random
from dataclasses import dataclass

from client import Job, random_prompt

MIXED = "mixed 256"
BATCHES = {
    "batch 1": (1, 128, 256),
    "batch 8": (8, 512, 128),
    "batch 32": (32, 512, 128),
    "batch 128": (128, 512, 128),
    "prefill": (32, 2048, 1),
    "context 3800": (1, 3800, 200),
}
"""Name to requests, tokens in, tokens out."""
FIRST_TOKEN, CONCURRENCY = "first token", "concurrency"
WORKLOADS = (*BATCHES, MIXED, FIRST_TOKEN, CONCURRENCY)


@dataclass(frozen=True)
class Sizes:
    """The workloads' sizes, divided by ``shrink`` for a run that only shows that all works."""

    vocab_size: int
    shrink: int = 1

    def _of(self, size: int) -> int:
        return max(1, size // self.shrink)

    def batch(self, name: str, seed: int) -> list[Job]:
        requests, prompt, output = BATCHES[name]
        return self._uniform(seed, self._of(requests), self._of(prompt), self._of(output))

    def concurrent(self, requests: int, seed: int) -> list[Job]:
        return self._uniform(seed, requests, self._of(256), self._of(256))

    def mixed(self) -> list[Job]:
        """256 requests of 100 to 1,024 tokens in and out: 133,966 tokens out.

        The recipe of nano-vllm's bench.py, in its order of draws, so that figures compare.
        """
        rng = random.Random(0)
        low, high = self._of(100), self._of(1024)
        largest_id = min(10000, self.vocab_size - 1)
        prompts = [
            [rng.randint(0, largest_id) for _ in range(rng.randint(low, high))]
            for _ in range(self._of(256))
        ]
        return [Job(prompt, rng.randint(low, high)) for prompt in prompts]

    def shared_prefix(self, seed: int, block_size: int) -> tuple[Job, Job, int]:
        """Two prompts of 2,112 tokens, and the number of first tokens (2,048) that they share."""
        rng = random.Random(seed)
        shared = max(self._of(2048) // block_size, 1) * block_size
        prefix = random_prompt(rng, self.vocab_size, shared)
        tails = [random_prompt(rng, self.vocab_size, self._of(64)) for _ in range(2)]
        first, second = (Job(prefix + tail, 1) for tail in tails)
        return first, second, shared

    def _uniform(self, seed: int, requests: int, prompt: int, output: int) -> list[Job]:
        rng = random.Random(seed)
        return [Job(random_prompt(rng, self.vocab_size, prompt), output) for _ in range(requests)]
