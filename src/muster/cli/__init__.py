"""muster …: the command line."""
