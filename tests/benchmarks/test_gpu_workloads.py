import gpu_reference
import pytest
from gpu_measure import CACHED, COLD
from gpu_workloads import BATCHES, MIXED, Sizes


def test_the_mixed_workload_is_the_one_that_others_were_measured_on() -> None:
    jobs = Sizes(vocab_size=151936).mixed()
    assert len(jobs) == 256
    assert sum(len(job.prompt_token_ids) for job in jobs) == 142827
    assert sum(job.num_output_tokens for job in jobs) == 133966


def test_a_batch_has_the_size_that_its_name_says() -> None:
    jobs = Sizes(1000).batch("batch 8", seed=0)
    assert [(len(job.prompt_token_ids), job.num_output_tokens) for job in jobs] == [(512, 128)] * 8
    assert len({tuple(job.prompt_token_ids) for job in jobs}) == 8
    assert jobs != Sizes(1000).batch("batch 8", seed=1)


@pytest.mark.parametrize("shrink", [1, 8, 64, 5000])
def test_everything_shrinks_and_nothing_vanishes(shrink: int) -> None:
    sizes = Sizes(vocab_size=50, shrink=shrink)
    for jobs in (sizes.mixed(), *(sizes.batch(name, 0) for name in BATCHES)):
        assert jobs
        assert all(job.num_output_tokens >= 1 for job in jobs)
        assert all(0 <= token < 50 for job in jobs for token in job.prompt_token_ids)
    first, second, shared = sizes.shared_prefix(0, block_size=16)
    assert shared % 16 == 0
    assert first.prompt_token_ids[:shared] == second.prompt_token_ids[:shared]
    assert len(first.prompt_token_ids) > shared


def test_a_shared_prefix_is_2048_of_2112_tokens() -> None:
    first, second, shared = Sizes(1000).shared_prefix(3, block_size=16)
    assert (shared, len(first.prompt_token_ids), len(second.prompt_token_ids)) == (2048, 2112, 2112)
    assert first != second


def test_references_name_workloads_that_exist() -> None:
    known = {*BATCHES, MIXED, COLD, CACHED}
    for reference in gpu_reference.REFERENCES.values():
        assert set(reference.bars) <= known
        assert all(set(figures) <= known for figures in reference.peers.values())
