"""Drills: what could lose work is done on purpose, and what is left is compared with a run that nothing happened to."""
