from collections.abc import Iterator

import pytest

from tests.serving.live import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(max_model_len=4096) as server:
        yield server
