"""Which of a server's engines gets a request."""
