"""Nets as plain `nn.Module`s, and `registry.build_net`, which makes one by its name.

Nothing is imported here, so that naming a net of ours does not load torchvision's.
"""
