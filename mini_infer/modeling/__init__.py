"""Layers, architectures, weights, sampler and the model runner."""
