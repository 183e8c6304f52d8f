"""One function per operation: a slow torch reference, and fast implementations behind it."""
