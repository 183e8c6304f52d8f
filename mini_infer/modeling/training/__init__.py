"""Training of what drafts for a model: the model itself never changes."""
