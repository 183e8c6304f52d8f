"""Block tables and prefix matches of requests."""

import random

import pytest

from mini_infer.cache.manager import NO_MATCH, KVCacheManager, PrefixMatch
from mini_infer.core.events import (
    BlockEvicted,
    BlocksAllocated,
    BlocksCached,
    BlocksReleased,
    Event,
    EventStream,
    PrefixCacheReset,
)
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams


def manager_of(num_blocks: int = 8, block_size: int = 4, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, EventStream(), enable_prefix_caching=caching)


def request_of(
    name: str, tokens: list[int], salt: str = "", params: SamplingParams | None = None
) -> Request:
    return Request(name, tokens, params or SamplingParams(), 0, 16, cache_salt=salt)


def prefill(manager: KVCacheManager, request: Request) -> int:
    """Admits and computes a whole prompt; returns the cached tokens."""
    prefix = manager.match_prefix(request)
    count = request.num_prompt_tokens - prefix.num_tokens
    assert manager.allocate(request, count, prefix) is not None
    request.num_computed_tokens = request.num_prompt_tokens
    manager.commit(request, request.num_computed_tokens)
    manager.check_invariants()
    return prefix.num_tokens


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_at_most_one_block_is_partly_filled(tokens: int, blocks: int) -> None:
    manager = manager_of()
    prefill(manager, request_of("a", list(range(tokens))))
    assert manager.num_used_blocks == blocks


def test_growing_takes_a_block_only_at_the_boundary() -> None:
    manager = manager_of()
    request = request_of("a", [1, 2, 3])
    prefill(manager, request)
    assert manager.allocate(request, 1) == []
    request.num_computed_tokens = 4
    assert len(manager.allocate(request, 1) or []) == 1
    assert len(manager.block_table(request)) == 2


def test_failed_allocation_changes_nothing() -> None:
    manager = manager_of(num_blocks=2)
    request = request_of("a", list(range(12)))
    assert manager.allocate(request, 12) is None
    assert manager.block_table(request) == ()
    assert manager.num_used_blocks == 0
    manager.check_invariants()


def test_a_second_request_shares_the_full_blocks_of_the_first() -> None:
    manager = manager_of()
    head = list(range(8))
    first, second = request_of("a", [*head, 90]), request_of("b", [*head, 91, 92])
    assert prefill(manager, first) == 0
    assert prefill(manager, second) == 8
    assert manager.block_table(first)[:2] == manager.block_table(second)[:2]
    assert manager.num_used_blocks == 4


def test_a_match_has_no_side_effect() -> None:
    manager = manager_of()
    prefill(manager, request_of("a", list(range(8))))
    before = manager.num_used_blocks
    for _ in range(3):
        manager.match_prefix(request_of("b", list(range(8))))
    assert manager.num_used_blocks == before
    manager.check_invariants()


def test_regression_05_a_fully_cached_prompt_recomputes_its_last_token() -> None:
    manager = manager_of()
    first = request_of("a", list(range(8)))
    prefill(manager, first)
    manager.release(first)
    assert manager.match_prefix(request_of("b", list(range(8)))).num_tokens == 4
    assert manager.match_prefix(request_of("c", list(range(9)))).num_tokens == 8


def test_regression_05_block_size_one_still_leaves_a_token() -> None:
    manager = manager_of(block_size=1)
    prefill(manager, request_of("a", [1, 2, 3]))
    assert manager.match_prefix(request_of("b", [1, 2, 3])).num_tokens == 2


def test_regression_06_a_reused_block_is_a_miss_for_its_old_content() -> None:
    manager = manager_of(num_blocks=2)
    x, y = request_of("x", [1, 2, 3, 4, 5]), request_of("y", [9, 8, 7, 6, 5, 4])
    prefill(manager, x)
    manager.release(x)
    prefill(manager, y)
    manager.release(y)
    assert manager.match_prefix(request_of("x2", [1, 2, 3, 4, 5])) == NO_MATCH
    assert manager.match_prefix(request_of("y2", [9, 8, 7, 6, 5, 4])).num_tokens == 4


def test_uncommitted_tokens_are_not_shared() -> None:
    manager = manager_of()
    request = request_of("a", list(range(12)))
    manager.allocate(request, 12)
    manager.commit(request, 7)
    assert manager.match_prefix(request_of("b", list(range(12)))).num_tokens == 4


def test_generated_tokens_are_shared_too() -> None:
    manager = manager_of()
    request = request_of("a", [1, 2, 3])
    prefill(manager, request)
    for token in (4, 5, 6, 7, 8):
        request.token_ids.append(token)
        assert manager.allocate(request, 1) is not None
        request.num_computed_tokens += 1
        manager.commit(request, request.num_computed_tokens)
    assert manager.match_prefix(request_of("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])).num_tokens == 8


def test_tenants_with_different_salts_share_nothing() -> None:
    manager = manager_of()
    prefill(manager, request_of("a", list(range(9)), salt="tenant-1"))
    assert manager.match_prefix(request_of("b", list(range(9)), salt="tenant-2")) == NO_MATCH
    assert manager.match_prefix(request_of("c", list(range(9)))) == NO_MATCH
    assert manager.match_prefix(request_of("d", list(range(9)), salt="tenant-1")).num_tokens == 8


def test_prompt_logprobs_need_every_position_so_nothing_matches() -> None:
    manager = manager_of()
    prefill(manager, request_of("a", list(range(9))))
    asks = request_of("b", list(range(9)), params=SamplingParams(prompt_logprobs=0))
    assert manager.match_prefix(asks) == NO_MATCH


def test_switched_off_nothing_matches_and_nothing_is_kept() -> None:
    manager = manager_of(caching=False)
    first = request_of("a", list(range(9)))
    prefill(manager, first)
    manager.release(first)
    assert manager.match_prefix(request_of("b", list(range(9)))) == NO_MATCH
    manager.check_invariants()


def test_a_shared_head_outlives_its_tail() -> None:
    manager = manager_of(num_blocks=4)
    head = request_of("a", list(range(12)))
    prefill(manager, head)
    manager.release(head)
    filler = request_of("f", [70, 71, 72, 73, 74, 75])
    prefill(manager, filler)  # takes the free block, then evicts one
    assert manager.match_prefix(request_of("b", list(range(13)))).num_tokens == 8


def test_revived_blocks_are_not_counted_as_room_twice() -> None:
    manager = manager_of(num_blocks=3)
    first = request_of("a", list(range(12)))
    prefill(manager, first)
    manager.release(first)
    second = request_of("b", [*range(8), 60, 61, 62, 63, 64])
    prefix = manager.match_prefix(second)
    assert prefix.num_tokens == 8
    assert manager.blocks_needed(second, 5, prefix) == 4
    assert manager.allocate(second, 5, prefix) is None
    assert manager.allocate(second, 4, prefix) is not None
    manager.check_invariants()


def test_a_prefix_grows_while_another_request_computes_it() -> None:
    manager = manager_of()
    tokens = list(range(14))
    first, same = request_of("a", tokens), request_of("b", tokens)
    assert manager.match_prefix(same) == NO_MATCH
    manager.allocate(first, 8)  # its first chunk
    assert manager.match_prefix(same) == PrefixMatch((), 0, num_growing_tokens=12)
    first.num_computed_tokens = 8
    manager.commit(first, 8)
    half = manager.match_prefix(same)
    assert (half.num_tokens, half.num_growing_tokens) == (8, 4)
    other = manager.match_prefix(request_of("c", [*tokens[:8], 99, 98, 97, 96, 95]))
    assert (other.num_tokens, other.num_growing_tokens) == (8, 0)
    manager.allocate(first, 6)
    manager.commit(first, 14)
    whole = manager.match_prefix(same)
    assert (whole.num_tokens, whole.num_growing_tokens) == (12, 0)
    manager.check_invariants()


def test_a_prefix_grows_no_more_when_its_request_gives_up() -> None:
    manager = manager_of()
    first, same = request_of("a", list(range(14))), request_of("b", list(range(14)))
    manager.allocate(first, 8)
    first.num_computed_tokens = 8
    manager.commit(first, 4)
    manager.release(first)
    match = manager.match_prefix(same)
    assert (match.num_tokens, match.num_growing_tokens) == (4, 0)
    manager.check_invariants()


def test_reset_forgets_prefixes_and_running_requests_go_on() -> None:
    manager = manager_of()
    request = request_of("a", list(range(9)))
    prefill(manager, request)
    manager.reset_prefix_cache()
    assert manager.match_prefix(request_of("b", list(range(9)))) == NO_MATCH
    assert manager.allocate(request, 4) is not None
    request.token_ids += [1, 2, 3, 4]
    manager.commit(request, 13)
    manager.check_invariants()
    manager.release(request)
    assert manager.num_used_blocks == 0


def test_events_tell_every_block() -> None:
    events: list[Event] = []
    stream = EventStream()
    stream.subscribe(events.append)
    manager = KVCacheManager(2, 4, stream)
    first = request_of("a", list(range(8)))
    prefill(manager, first)
    manager.release(first)
    prefill(manager, request_of("b", [50, 51]))
    kinds = [type(event) for event in events]
    assert kinds == [
        BlocksAllocated,
        BlocksCached,
        BlocksReleased,
        BlockEvicted,
        BlocksAllocated,
    ]


def test_events_tell_which_prefixes_can_be_found() -> None:
    stream, told = EventStream(), set[bytes]()

    def observe(event: Event) -> None:
        match event:
            case BlocksCached():
                assert event.block_hashes
                assert told.isdisjoint(event.block_hashes)
                told.update(event.block_hashes)
            case BlockEvicted():
                told.remove(event.block_hash)
            case PrefixCacheReset():
                told.clear()

    stream.subscribe(observe)
    manager, rng = KVCacheManager(8, 4, stream), random.Random(2)
    for number in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        request = request_of(str(number), tokens)
        prefill(manager, request)
        assert told == set(manager._pool._block_of)
        manager.release(request)
        if number % 50 == 49:
            manager.reset_prefix_cache()
            assert not told


def test_random_requests_leave_nothing_behind() -> None:
    rng = random.Random(1)
    manager = manager_of(num_blocks=12)
    live: list[Request] = []
    for number in range(600):
        request = request_of(str(number), [rng.randrange(2) for _ in range(rng.randrange(1, 18))])
        prefix = manager.match_prefix(request)
        if manager.allocate(request, len(request.token_ids) - prefix.num_tokens, prefix) is None:
            manager.release(live.pop(rng.randrange(len(live))))
        else:
            request.num_computed_tokens = len(request.token_ids)
            manager.commit(request, rng.randrange(len(request.token_ids) + 1))
            live.append(request)
        manager.check_invariants()
    for request in live:
        manager.release(request)
    assert manager.num_used_blocks == 0
    manager.check_invariants()
