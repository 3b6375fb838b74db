"""One training: what a request makes of it, what is true of it, and what is to be done about it."""
