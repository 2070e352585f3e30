"""Labelling: `review` corrects labels in the browser, and `next` selects the unlabelled images to label next."""
