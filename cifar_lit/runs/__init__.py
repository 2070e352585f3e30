"""The run folder: its number, curves, metrics and weights."""
