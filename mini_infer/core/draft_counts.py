"""How drafts fare: per request, and in sum."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Counts of verified drafts by their position, the first draft of a step being at 0."""

    num_verifications: int = 0
    """Steps of requests that verified at least one draft."""
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """What these steps took, by the cost model: a request's share of each is the whole step."""
    plain_seconds: float = 0.0
    """What plain decoding would have taken for the same tokens, by the cost model."""
    num_reached: int = 0
    """Drafts before which none was rejected: the others, nobody asked whether they are right."""

    def add(
        self, num_drafts: int, num_accepted: int, seconds: float = 0.0, plain_seconds: float = 0.0
    ) -> None:
        """Takes in one verification; ``plain_seconds`` is for all of its tokens."""
        self.num_verifications += 1
        self.num_reached += min(num_drafts, num_accepted + 1)
        for counts in (self.proposed, self.accepted):
            counts.extend([0] * (num_drafts - len(counts)))
        for position in range(num_drafts):
            self.proposed[position] += 1
        for position in range(num_accepted):
            self.accepted[position] += 1
        self.seconds += seconds
        self.plain_seconds += plain_seconds

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.proposed)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted among all drafts; None where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_of_reached(self) -> float | None:
        """Accepted among the drafts that were reached: how often a draft is right (the alpha of
        arXiv 2211.17192), however many are proposed behind it."""
        return self.num_accepted_tokens / self.num_reached if self.num_reached else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of each position: accepted among those that were proposed there."""
        return [yes / all_ for yes, all_ in zip(self.accepted, self.proposed, strict=True)]

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens that a verification yields, its own one included (vLLM's mean acceptance
        length)."""
        if not self.num_verifications:
            return None
        return 1.0 + self.num_accepted_tokens / self.num_verifications

    @property
    def speedup(self) -> float | None:
        """Over plain decoding, by the cost model; None where it knows no times."""
        return self.plain_seconds / self.seconds if self.seconds else None
