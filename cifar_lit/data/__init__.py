"""Data: sources, the decode cache, batch augmentation, loaders and `ImageData`.

Nothing is imported here, so that decoding processes start without torch.
"""
