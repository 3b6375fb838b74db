"""Handlers, one module per kind of call. Each exports OPERATIONS: what it answers, and how that is described."""
