"""Correct labels in the browser: `cifar-lit review`."""
