"""KV-cache bookkeeping: block pool, prefix hashing, manager. Pure Python, no torch."""
