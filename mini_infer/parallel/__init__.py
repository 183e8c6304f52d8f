"""Process groups, collectives and KV transport."""
