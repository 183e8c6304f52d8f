import math

import pytest
import torch
from torch import Tensor

from mini_infer.kernels import sampling as ops

CPU = torch.device("cpu")
EULER = 0.5772156649
GOLDEN = [0.758, 1.813, -1.739, 0.035, 1.205, 0.816]


def noise(seed: int, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise ``[P, V]`` at some positions of one seed."""
    seeds = torch.full_like(positions, ops.splitmix64(seed))
    hashes = ops.token_hashes(vocab_size, CPU)
    return -ops.negative_gumbel(hashes, *ops.row_keys(seeds, positions))


def uniform(seed: int, positions: Tensor, vocab_size: int) -> Tensor:
    return -torch.expm1(-torch.exp(-noise(seed, positions, vocab_size).double()))


class TestNoise:
    U = uniform(7, torch.arange(500), 1000)

    def test_is_uniform(self) -> None:
        """Chi-squared over 256 cells: mean 255, standard deviation 22.6."""
        counts = (self.U.flatten() * 256).long().bincount(minlength=256).double()
        expected = self.U.numel() / 256
        assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 4.5 * 22.6

    @pytest.mark.parametrize("dim", [0, 1])
    def test_is_uniform_along_every_line(self, dim: int) -> None:
        """The means of positions (of tokens) scatter as means of independent uniforms do."""
        n = self.U.shape[dim]
        z = (self.U.mean(dim) - 0.5) * math.sqrt(12 * n)
        assert abs(float(z.mean())) < 4.5 / math.sqrt(len(z))
        assert abs(float(z.var()) - 1) < 4.5 * math.sqrt(2 / len(z))

    @pytest.mark.parametrize("lag", [1, 2, 16, 255])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_neighbours_are_uncorrelated(self, dim: int, lag: int) -> None:
        n = self.U.shape[dim] - lag
        a, b = self.U.narrow(dim, 0, n), self.U.narrow(dim, lag, n)
        correlation = float(((a - 0.5) * (b - 0.5)).mean()) * 12
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())

    @pytest.mark.parametrize("difference", [1, 2, 2**31, 2**32, 2**63, 0x9E3779B97F4A7C15])
    def test_seeds_are_uncorrelated(self, difference: int) -> None:
        positions = torch.arange(300)
        here = uniform(5, positions, 500)
        there = uniform(5 + difference, positions, 500)
        for a, b in ((here, there), (here[1:], there[:-1]), (here[:, 1:], there[:, :-1])):
            correlation = float(((a - 0.5) * (b - 0.5)).mean()) * 12
            assert abs(correlation) < 4.5 / math.sqrt(a.numel())

    def test_the_largest_of_a_row_is_anywhere(self) -> None:
        best = self.U.argmax(1)
        assert len(best.unique()) > 0.7 * 500
        assert abs(float(best.double().mean()) - 500) < 4.5 * 1000 / math.sqrt(12 * 500)

    def test_two_rows_rarely_share_a_value(self) -> None:
        """Birthday count of equal values between rows: they are no shuffles of each other."""
        hashes = ops.token_hashes(50_000, CPU)
        keys = ops.row_keys(torch.full((2,), ops.splitmix64(1)), torch.arange(2))
        first, second = ops._hash32(hashes, *keys)
        assert len(first.unique()) == 50_000
        shared = 100_000 - len(torch.cat((first, second)).unique())
        assert shared <= 5  # expected: 50,000^2 / 2^32 = 0.58

    @pytest.mark.parametrize("bit", [0, 1, 15, 31, 32, 47, 62])
    def test_every_bit_of_seed_and_position_flips_half(self, bit: int) -> None:
        hashes = ops.token_hashes(2000, CPU)
        seeds = torch.tensor([ops.splitmix64(3), ops.splitmix64(3 ^ (1 << bit)), ops.splitmix64(3)])
        positions = torch.tensor([9, 9, 9 ^ (1 << (bit % 20))])
        base, by_seed, by_position = ops._hash32(hashes, *ops.row_keys(seeds, positions))
        for other in (by_seed, by_position):
            flipped = torch.stack([((base ^ other) >> i) & 1 for i in range(32)]).double().mean(1)
            assert float((flipped - 0.5).abs().max()) < 4.5 * 0.5 / math.sqrt(2000)

    def test_is_gumbel(self) -> None:
        g = noise(11, torch.arange(400), 1000).double()
        assert abs(float(g.mean()) - EULER) < 0.01
        assert abs(float(g.var()) - math.pi**2 / 6) < 0.02

    def test_is_finite_at_both_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
        monkeypatch.setattr(ops, "_hash32", lambda tokens, key0, key1: tokens.clone())
        g = -ops.negative_gumbel(ends, ends, ends)
        assert torch.isfinite(g).all()
        assert float(g.max()) > 21
        assert float(g.min()) > -3

    @pytest.mark.parametrize("vocab_size", [1, 5, 17, 1000])
    def test_does_not_depend_on_the_shape(self, vocab_size: int) -> None:
        whole = noise(1, torch.arange(9), 1000)
        for position in range(9):
            alone = noise(1, torch.tensor([position]), vocab_size)
            assert torch.equal(alone[0], whole[position, :vocab_size])

    def test_of_chosen_tokens_equals_that_of_all(self) -> None:
        hashes = ops.token_hashes(300, CPU)
        keys = ops.row_keys(torch.tensor([4, 5]), torch.tensor([6, 7]))
        ids = torch.tensor([[3, 299, 0], [8, 8, 1]])
        whole = ops.negative_gumbel(hashes, *keys)
        assert torch.equal(ops.negative_gumbel(hashes[ids], *keys), whole.gather(1, ids))

    def test_golden_values(self) -> None:
        """Outputs of seeded requests must survive a change of this file."""
        g = noise(42, torch.tensor([1, 1000]), 3)
        assert [round(x, 3) for x in g.flatten().tolist()] == GOLDEN


def test_splitmix64_matches_its_published_sequence() -> None:
    """The first outputs for seed 1234567, as the algorithm's reference code prints them."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(ops.splitmix64(state) % 2**64)
        state += 0x9E3779B97F4A7C15
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


class TestOrder:
    @pytest.mark.parametrize("k", [1, 3, 8])
    def test_ties_list_by_id(self, k: int) -> None:
        logits = torch.tensor([[1.0, 2.0, 2.0, -1.0, -0.0, 0.0, 2.0, -float("inf")]])
        assert ops.top_tokens(logits, k).tolist() == [[1, 2, 6, 0, 4, 5, 3, 7][:k]]

    def test_matches_a_stable_sort(self) -> None:
        logits = torch.randint(-4, 5, (20, 60), generator=torch.Generator().manual_seed(2)) / 2
        expected = logits.sort(dim=-1, descending=True, stable=True).indices
        for k in (5, 59, 60):
            assert torch.equal(ops.top_tokens(logits, k), expected[:, :k])

    def test_the_first_few_do_not_depend_on_how_many(self) -> None:
        logits = torch.zeros(2, 50)
        assert torch.equal(ops.top_tokens(logits, 7), ops.top_tokens(logits, 50)[:, :7])

    def test_keys_are_distinct_and_nan_is_largest(self) -> None:
        logits = torch.tensor([[0.0, float("inf"), float("nan"), 0.0]])
        keys = ops.order_keys(logits)
        assert len(keys.unique()) == 4
        assert int(keys.argmax()) == 2


class TestTruncate:
    LOG_PROBS = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()

    def kept(self, top_k: int, top_p: float, num_candidates: int = 4) -> tuple[list[int], bool]:
        ids, kept, complete = ops.truncate(
            self.LOG_PROBS,
            torch.tensor([top_k]),
            torch.tensor([top_p], dtype=torch.float64),
            num_candidates,
        )
        return ids[kept > -math.inf].tolist(), bool(complete.item())

    def test_regression_13_keeps_the_smallest_set_that_reaches_the_mass(self) -> None:
        assert self.kept(0, 0.6) == ([3, 2], True)

    @pytest.mark.parametrize(
        ("top_k", "top_p", "ids"),
        [(2, math.inf, [3, 2]), (3, 0.5, [3, 2]), (1, 0.9, [3]), (0, 0.95, [3, 2, 1, 0])],
    )
    def test_both(self, top_k: int, top_p: float, ids: list[int]) -> None:
        assert self.kept(top_k, top_p) == (ids, True)

    def test_tells_when_candidates_are_too_few(self) -> None:
        assert self.kept(0, 0.6, 1) == ([3], False)
        assert self.kept(0, 0.6, 2) == ([3, 2], True)
        assert self.kept(0, 0.8, 2) == ([3, 2], False)


def test_penalties_past_the_end_of_a_row_do_nothing() -> None:
    logits = torch.ones(2, 4)
    tokens = torch.tensor([[0, 3, 3], [1, 2, 2]], dtype=torch.int32)
    two = torch.tensor([2.0, 2.0])
    ops.penalize_(logits, tokens, torch.tensor([1, 3]), torch.tensor([1, 1]), two, two, two)
    assert logits.tolist() == [[0.5, 1, 1, 1], [1, 0.5, 0.5 - 2 * 2 - 2, 1]]


def test_a_ban_with_padding_leaves_the_padded_id_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    ids = torch.tensor([[2, 0, 0], [0, 0, 0]])
    active = torch.tensor([[True, False, False], [True, False, False]])
    ops.ban_(logits, ids, active)
    assert logits.tolist() == [[1, 2, -math.inf], [-math.inf, 2, 3]]
