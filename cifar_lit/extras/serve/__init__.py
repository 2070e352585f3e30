"""The HTTP service of a net: `app` answers, `images` parses and decodes, `connections` limits the clients."""
