"""Images in: sources, the decode cache, augmentation on batches, loaders and `ImageData`.

Nothing is imported here, so that decoding processes start without torch.
"""
