"""A load generator for any server of OpenAI's API: ``mini-infer bench serve``."""
