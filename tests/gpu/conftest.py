"""Tests of this folder need a GPU. Without one they are not collected, rather than skipped."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
