"""Measurements for users (`cifar-lit bench`), and the reporting that scripts/benchmarks shares with them."""

from cifar_lit.plugins import guard_packages

guard_packages()  # Processes spawned by a benchmark do not import cifar_lit.cli.
