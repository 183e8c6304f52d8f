"""Are answers of two engines the same? And where one differs, was that a matter of rounding?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness import Bar, Report

from mini_infer import LLM, SamplingParams
from mini_infer.core.engine_config import EngineConfig

NEAR_TIE = 0.5
"""Greatest difference of the log-probabilities of two tokens that rounding may make change places:
four units in the last place of a bfloat16 logit between 16 and 32."""
CANDIDATES = 5


def rounds_alike(config: EngineConfig) -> bool:
    """Do several rows of a product come out as each by itself does, to within what never decides
    between two tokens? Where arithmetic is float32; a CPU's is, for weights in float16, too."""
    return config.dtype == "float32" or (config.device, config.dtype) == ("cpu", "float16")


@dataclass
class Sameness:
    """Answers compared with plain decoding's."""

    num_answers: int = 0
    num_same: int = 0
    differing: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    """Greedy ones that are yet to be looked at: the prompt, plain decoding's answer, the other."""
    num_looked_at: int = 0
    num_near_ties: int = 0

    def add(
        self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], greedy: bool
    ) -> None:
        """Takes in an answer."""
        self.num_answers += 1
        if plain == other:
            self.num_same += 1
        elif greedy:
            self.differing.append((list(prompt), list(plain), list(other)))

    def look(self, plain: LLM) -> None:
        """Asks plain decoding how likely both tokens were where answers first differ."""
        for prompt, ours, theirs in self.differing:
            self.num_looked_at += 1
            self.num_near_ties += _is_near_tie(plain, prompt, ours, theirs)
        self.differing.clear()

    def report(self, method: str, report: Report, has_bar: bool) -> None:
        """Says how many are identical, as a bar or as a note."""
        identical = 100 * self.num_same / self.num_answers
        if has_bar:
            report.bars.append(Bar(f"{method}: answers identical to plain %", identical, 100))
            return
        note = f"{method}: answers identical to plain: {identical:.1f} %, without a bar: in this "
        note += "type several rows of a product round differently from one"
        if self.num_looked_at:
            share = 100 * self.num_near_ties / self.num_looked_at
            note += (
                f"; of {self.num_looked_at} greedy ones that differ, {share:.0f} % first do at a "
                f"near-tie: plain decoding's likelihoods of both tokens are within a factor of "
                f"{math.exp(NEAR_TIE):.2f}"
            )
        report.notes.append(note)


def _is_near_tie(plain: LLM, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    pairs = zip(ours, theirs, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return False  # an answer is never the beginning of another one
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=CANDIDATES, ignore_eos=True)
    [output] = plain.generate([prompt + ours[:place]], params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "they were asked for"
    found = [logprobs[0].get(token) for token in (ours[place], theirs[place])]
    values = [item.logprob for item in found if item is not None]
    return len(values) == 2 and abs(values[0] - values[1]) <= NEAR_TIE
