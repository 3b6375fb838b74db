"""The names of other tools over what muster does, for programs that were written for them."""
