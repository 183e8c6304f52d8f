"""Scheduler, engine, executors, detokenizer and the offline ``LLM`` class."""
