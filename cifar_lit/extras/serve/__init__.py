"""The HTTP service of a net, with a page."""
