"""Ranks (processes) of one run: how they connect, and how all ranks end when a rank is lost."""
