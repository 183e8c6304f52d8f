"""Fixtures of the whole suite."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format; downloaded and converted the first time."""
    from mini_infer.modeling.pull import pull

    return pull("smollm2-135m")
