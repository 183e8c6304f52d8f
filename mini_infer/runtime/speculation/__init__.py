"""Speculative decoding, as the host sees it: who proposes, how many, and how that fares."""
