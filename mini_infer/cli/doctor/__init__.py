"""``mini-infer doctor``: what is here, what works, and what of a model would fit."""
