"""The HTTP API: what is asked for over the network becomes edits of the store and reads from it."""
