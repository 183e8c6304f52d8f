"""The ``mini-infer`` and ``mini-infer-serve`` commands."""
