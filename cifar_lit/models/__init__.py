"""Nets as plain `nn.Module`s. Imports nothing, so that our own nets load without torchvision."""
