"""Data: sources, the decode cache, batch augmentation, loaders and `ImageData`.

Nothing is imported here, so that a command without images starts without torch.
"""
