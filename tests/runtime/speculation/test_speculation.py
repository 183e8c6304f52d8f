"""What the scheduler's side of speculation tells."""

import pytest

from mini_infer.core.batch import Chunk
from mini_infer.core.events import DraftsVerified, Event, EventStream
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.runtime.speculation.speculation import Speculation
from tests.runtime.fake_executor import make_config

COSTS = StepCosts((1,), (0, 4), ((1.0, 1.2),), ((0.0, 0.3),))


@pytest.mark.parametrize(("on_device", "seconds"), [(False, 1.2), (True, 1.5)])
def test_what_is_told_of_drafts_has_the_time_of_a_device_that_proposes(
    on_device: bool, seconds: float
) -> None:
    config = SpeculativeConfig(method="ngram", on_device=on_device)
    events, told = EventStream(), list[Event]()
    events.subscribe(told.append, DraftsVerified)
    speculation = Speculation(make_config(speculative_config=config), events, COSTS)
    request = Request("a", [1, 2, 3], SamplingParams(), seed=0, max_tokens=8)
    chunk = Chunk("a", 0, 2, 5, num_drafts=4)
    speculation.take_in(request, chunk, num_tokens=3, num_rows=1)
    (event,) = told
    assert isinstance(event, DraftsVerified)
    assert (event.num_drafts, event.num_accepted, event.plain_seconds) == (4, 2, 3.0)
    assert event.seconds == pytest.approx(seconds, rel=1e-3)
