"""What a replica was given to do, and has not done."""

from collections.abc import Sequence

from mini_infer.core.events import Admitted, Event, Finished, TokensEmitted

CHOICE_TOKENS = 256
"""What a choice weighs beside its prompt, in prompt tokens: how long its answer will be, nobody
knows before it ends."""


class ReplicaLoad:
    """Choices of one replica that have not ended, weighed in tokens.

    ::

        given              Admitted           first token              Finished
          |--- prompt, less what is cached -------|
          |      by the router | by the engine    |
          |--- CHOICE_TOKENS ------------------------------------------|
    """

    KINDS: tuple[type[Event], ...] = (Admitted, TokensEmitted, Finished)

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_recent_tokens = 0.0
        """Of all choices so far, less what ``fade`` took."""
        self._choices: set[str] = set()
        self._prompts: dict[str, int] = {}
        """Prompt tokens to compute, of those without a token."""

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    def give(self, choice_ids: Sequence[str], num_uncached_tokens: int) -> None:
        """Choices of one prompt, which the first of them computes."""
        for choice_id in choice_ids:
            self._choices.add(choice_id)
            self._prompts[choice_id] = num_uncached_tokens
            self._add(num_uncached_tokens + CHOICE_TOKENS)
            num_uncached_tokens = 0

    def fade(self, kept: float) -> None:
        """Lets only this share of the past still count."""
        self.num_recent_tokens *= kept

    def take_back(self, choice_id: str) -> None:
        """It ended, or was refused; harmless when it is not here."""
        if choice_id in self._choices:
            self._choices.remove(choice_id)
            self.num_tokens -= self._prompts.pop(choice_id, 0) + CHOICE_TOKENS

    def take_all(self) -> None:
        """The engine is gone."""
        self._choices.clear()
        self._prompts.clear()
        self.num_tokens = 0

    def observe(self, event: Event) -> None:
        """Takes in an event of these ``KINDS``."""
        match event:
            case TokensEmitted():
                self.num_tokens -= self._prompts.pop(event.request_id, 0)
            case Admitted():
                guess = self._prompts.get(event.request_id)
                if guess is not None:
                    uncached = event.num_prompt_tokens - event.num_cached_tokens
                    self._prompts[event.request_id] = uncached
                    self._add(uncached - guess)
            case Finished():
                self.take_back(event.request_id)

    def _add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_recent_tokens += num_tokens
