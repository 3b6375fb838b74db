"""Decisions about GPUs that several pipelines share."""
