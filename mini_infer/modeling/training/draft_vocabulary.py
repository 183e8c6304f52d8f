"""Which tokens a head drafts: those that its target is likeliest to say."""

import torch
from torch import Tensor

from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.training.target_pass import TargetTexts

COUNTED_PLACES = 2**17
PLACES_AT_ONCE = 256


class DraftVocabulary:
    """Counts tokens along texts: those that stand there and, with their probabilities, those that
    could have. The latter tell rare ones apart long before they have been seen."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        device = model.embed_tokens.weight.device
        self._counts = torch.zeros(model.config.vocab_size, dtype=torch.float64, device=device)
        self._places_left = COUNTED_PLACES

    @torch.no_grad()
    def add(self, texts: TargetTexts) -> None:
        """Takes in a batch of the target's texts."""
        wanted = texts.wanted[:, 1:]
        said = torch.bincount(texts.token_ids[:, 1:][wanted], minlength=len(self._counts))
        self._counts += said
        hidden = texts.hidden[:, :-1][wanted][: self._places_left]
        self._places_left -= len(hidden)
        for some in torch.split(hidden, PLACES_AT_ONCE):
            self._counts += self._model.compute_logits(some).float().softmax(-1).sum(0)

    def most_likely(self, count: int) -> Tensor:
        """``[count]`` int64 token ids, ascending; all of them where there are no more."""
        count = min(count, len(self._counts))
        return self._counts.topk(count).indices.sort().values
