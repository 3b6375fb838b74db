"""Decisions: pure functions of a snapshot and a time. No I/O, clock, randomness, logging or threads."""
