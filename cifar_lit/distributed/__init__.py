"""Ranks (processes) of one run: how they connect, and how all end when one is lost."""
