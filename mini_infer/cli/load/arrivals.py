"""When requests arrive: at once, at a rate with more or less of a burst, or as a trace says."""

import random
from collections.abc import Iterator

from mini_infer.core.errors import InvalidConfigError


def arrival_times(num: int, rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """``num`` arrivals, in seconds from the start.

    Gaps are gamma-distributed with mean ``1 / rate`` and shape ``burstiness``, as ``vllm bench
    serve`` has them: 1 is a Poisson process, below that arrivals come in bursts, above it they
    are more regular. An infinite rate is all at once.

    Raises:
        InvalidConfigError: a rate or burstiness that is not above 0.
    """
    if not rate > 0:
        raise InvalidConfigError("--request-rate must be above 0 requests a second, or inf")
    if not 0 < burstiness < float("inf"):
        raise InvalidConfigError("--burstiness must be above 0; 1 is a Poisson process")
    time = 0.0
    for _ in range(num):
        yield time
        if rate != float("inf"):
            time += rng.gammavariate(burstiness, 1 / (rate * burstiness))
