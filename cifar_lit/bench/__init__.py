"""Measurements against plain PyTorch loops: interleaved in one process, as medians and ratios."""
