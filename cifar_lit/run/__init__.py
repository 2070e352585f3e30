"""One run: its folder, its files and its loggers."""
