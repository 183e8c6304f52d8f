"""Which rank of a model is in which stage of its pipeline. Ranks are numbered stage by stage."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """Where ``rank`` is among ``num_stages`` stages of ``stage_size`` ranks each."""

    rank: int
    stage_size: int
    num_stages: int

    @property
    def size(self) -> int:
        """Of all ranks."""
        return self.stage_size * self.num_stages

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def rank_in_stage(self) -> int:
        return self.rank % self.stage_size

    @property
    def is_in_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def tells_results(self) -> bool:
        """Is it the one that tells the engine what steps bring? The last stage samples."""
        return self.rank == self.size - self.stage_size

    def __str__(self) -> str:
        if self.num_stages == 1:
            return f"rank {self.rank}"
        return f"rank {self.rank} (stage {self.stage} of {self.num_stages})"
