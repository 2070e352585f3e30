"""The run folder: its number, lock, curves, metrics, weights and report."""
