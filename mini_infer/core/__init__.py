"""Plain data that crosses boundaries: configurations, requests, batches, outputs, events, errors.

Nothing in this package imports torch, so that the dry run and every unit test of the scheduler
start at once.
"""
