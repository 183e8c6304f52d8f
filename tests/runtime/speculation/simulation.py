"""Engines that only count: made-up step costs, and drafts that are right by the roll of a die."""

import random
from collections.abc import Callable, Sequence

from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.speculation.controller import DraftController
from mini_infer.runtime.speculation.host_drafts import HostDrafts
from mini_infer.runtime.speculation.proposer import Proposer


def make_costs(verify: float = 0.05, propose: float = 0.3, per_row: float = 0.02) -> StepCosts:
    """In plain steps of one request: what a row more costs, a draft verified, a draft proposed."""
    rows, drafts = (1, 4, 16, 64), (0, 1, 4, 16)
    plain = [1 + per_row * (count - 1) for count in rows]
    return StepCosts(
        rows,
        drafts,
        verify=tuple(
            tuple(base + verify * k * (1 + 0.3 * (r - 1)) for k in drafts)
            for base, r in zip(plain, rows, strict=True)
        ),
        propose=tuple(tuple(propose * k * (1 + 0.01 * r) for k in drafts) for r in rows),
    )


def make_request(prompt: Sequence[int], max_tokens: int = 1000, name: str = "r") -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, list(prompt), params, seed=0, max_tokens=max_tokens)


def device_speedup(
    acceptance: Callable[[int, int], float],
    num_steps: int,
    num_rows: int = 1,
    costs: StepCosts | None = None,
    depth: int = 2,
    num_speculative_tokens: int = 4,
    adaptive: bool = True,
) -> float:
    """Tokens per second over those of plain decoding; ``acceptance`` is of a step and position."""
    config = SpeculativeConfig(
        method="early_exit",
        num_speculative_tokens=num_speculative_tokens,
        adaptive=adaptive,
        on_device=True,
    )
    costs = costs or make_costs()
    controller = DraftController(config, costs)
    die = random.Random(0)
    seconds, num_tokens, verified = 0.0, 0, 0
    in_flight: list[list[tuple[int, int]]] = []
    for step in range(num_steps):
        proposed = controller.num_drafts(num_rows)
        seconds += costs.verify_seconds(num_rows, verified)
        seconds += costs.propose_seconds(num_rows, proposed)
        results = [(verified, num_right(die, acceptance, step, verified)) for _ in range(num_rows)]
        num_tokens += sum(1 + accepted for _, accepted in results)
        in_flight.append(results if verified else [])
        if len(in_flight) == depth:
            for result in in_flight.pop(0):
                controller.record(*result)
        verified = proposed
    return num_tokens / num_rows * costs.verify_seconds(num_rows, 0) / seconds


def num_right(
    die: random.Random, acceptance: Callable[[int, int], float], step: int, num_drafts: int
) -> int:
    """Drafts of a step that are right, up to the first that is not."""
    for position in range(num_drafts):
        if die.random() >= acceptance(step, position):
            return position
    return num_drafts


class HostRun:
    """One engine whose requests are told what to answer."""

    def __init__(
        self,
        proposer: Proposer,
        config: SpeculativeConfig,
        costs: StepCosts,
    ) -> None:
        self.controller = DraftController(config, costs)
        self.drafts = HostDrafts(config, proposer, self.controller)
        self.costs = costs
        self.num_steps = self.num_steps_with_drafts = self.num_drafts = 0
        self.seconds = self.plain_seconds = 0.0

    def answer(self, requests: Sequence[Request], texts: Sequence[Sequence[int]]) -> None:
        """All requests at once, until none has anything left to say."""
        while running := [
            (request, text)
            for request, text in zip(requests, texts, strict=True)
            if request.num_output_tokens < len(text)
        ]:
            self._step([request for request, _ in running], [text for _, text in running])

    def _step(self, requests: list[Request], texts: list[Sequence[int]]) -> None:
        num_rows = len(requests)
        plain_seconds = self.costs.verify_seconds(num_rows, 0)
        proposals: list[tuple[int, ...]] = [()] * num_rows
        self.num_steps += 1
        self.controller.pass_step(num_rows)
        if self.drafts.drafting(num_rows):
            self.num_steps_with_drafts += 1
            room = [
                len(text) - request.num_output_tokens - 1
                for request, text in zip(requests, texts, strict=True)
            ]
            proposals = self.drafts.propose(requests, room)
            assert all(len(p) <= r for p, r in zip(proposals, room, strict=True))
        most = max(map(len, proposals))
        self.num_drafts += sum(map(len, proposals))
        self.seconds += self.costs.verify_seconds(num_rows, most)
        self.controller.end_step(num_rows, most, None)
        for request, text, proposal in zip(requests, texts, proposals, strict=True):
            rest = text[request.num_output_tokens :]
            accepted = 0
            while accepted < len(proposal) and proposal[accepted] == rest[accepted]:
                accepted += 1
            place = len(request.token_ids)
            request.token_ids.extend(rest[: accepted + 1])
            self.plain_seconds += (accepted + 1) * plain_seconds / num_rows
            if proposal:
                self.drafts.verified(request, place, accepted)
        self.drafts.watch(requests)

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds
