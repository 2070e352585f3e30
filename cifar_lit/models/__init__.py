"""Nets as plain `nn.Module`s. Nothing is imported here, so that naming a net of ours does not load torchvision's."""
