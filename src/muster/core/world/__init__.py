"""One run: what is known of it, what each report does to that, and what is to be done about it."""
