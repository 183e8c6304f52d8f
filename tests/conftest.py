"""Fixtures of the whole suite."""

from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine may pause at any moment: an example's time says nothing about the code.
settings.register_profile("mini-infer", deadline=None, print_blob=True)
settings.load_profile("mini-infer")


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format; downloaded and converted the first time."""
    from mini_infer.modeling.pull import pull

    return pull("smollm2-135m")
