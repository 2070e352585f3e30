"""Trained nets in use: classes of one's own images, exported files, a service."""
