"""Measurements against plain PyTorch loops: interleaved in one process, as medians and ratios."""

from cifar_lit.plugins import guard_packages

guard_packages()  # also in processes that a benchmark spawns, which do not import cifar_lit.cli
