"""Proposers of drafts that live where the model runs."""
