"""Numbers of the Python API's options: what is no whole number is a typed error."""

import math
from typing import Any

import pytest

from mini_infer.core.errors import InvalidConfigError
from mini_infer.runtime.resolve import parse_options


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1.5, "x", True, [], {}, b"5"])
def test_no_whole_number(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match="max_num_seqs must be an integer"):
        parse_options({"max_num_seqs": value})


@pytest.mark.parametrize("value", ["x", True, [], {}, 10**400])
def test_no_number(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match="gpu_memory_utilization must be a number"):
        parse_options({"gpu_memory_utilization": value})


@pytest.mark.parametrize("value", [1, 0.5, "0.5"])
def test_a_number_may_be_whole_or_a_text(value: Any) -> None:
    assert parse_options({"gpu_memory_utilization": value})["gpu_memory_utilization"] == float(
        value
    )


@pytest.mark.parametrize("value", [2**63 - 1, 2**63 + 1, 10**400])
def test_a_whole_number_of_any_size_is_kept(value: int) -> None:
    assert parse_options({"seed": value})["seed"] == value
