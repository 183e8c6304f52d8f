"""Where the tests of Triton's kernels run: on the GPU, or on the CPU in Triton's interpreter, which
``tests/conftest.py`` switches on."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
