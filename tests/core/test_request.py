"""A request's counts: what exists, what is known, what has KV."""

from mini_infer.core.kv_layout import KVLayout
from mini_infer.core.request import Request, RequestState
from mini_infer.core.sampling_params import SamplingParams


def request() -> Request:
    return Request("a", [5, 6, 7], SamplingParams(), seed=0, max_tokens=4)


def test_counts_of_a_new_request() -> None:
    new = request()
    assert new.token_ids == [5, 6, 7]
    assert (new.num_prompt_tokens, new.num_output_tokens, new.num_tokens) == (3, 0, 3)
    assert new.output_token_ids == []
    assert new.state is RequestState.WAITING
    assert not new.finished


def test_tokens_in_flight_exist_before_their_ids_are_known() -> None:
    running = request()
    running.token_ids += [8, 9]
    running.num_in_flight_tokens = 1
    assert running.output_token_ids == [8, 9]
    assert (running.num_output_tokens, running.num_tokens) == (2, 6)
    assert running.prompt_token_ids == [5, 6, 7]


def test_the_callers_prompt_is_not_extended() -> None:
    prompt = [1, 2]
    Request("a", prompt, SamplingParams(), seed=0, max_tokens=4).token_ids.append(3)
    assert prompt == [1, 2]


def test_finished_is_a_state() -> None:
    done = request()
    done.state = RequestState.FINISHED
    assert done.finished


def test_bytes_of_a_token_in_a_layer() -> None:
    assert KVLayout(3, 64).bytes_per_token(4) == 2 * 3 * 64 * 4
    assert KVLayout(1, 576, has_values=False).bytes_per_token(2) == 576 * 2


def test_what_may_end_it() -> None:
    params = SamplingParams(stop_token_ids=(1, 2))
    eos = frozenset({9})
    new = Request("a", [5, 6, 7], params, seed=0, max_tokens=4, eos_token_ids=eos)
    assert new.end_token_ids == {1, 2, 9}
    assert new.max_num_tokens == 7
    params = SamplingParams(stop_token_ids=(1, 2), ignore_eos=True)
    new = Request("a", [5, 6, 7], params, seed=0, max_tokens=4, eos_token_ids=eos)
    assert new.end_token_ids == {1, 2}
