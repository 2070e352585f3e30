"""The HTTP service of a net: `app` answers, `bodies` parses, `decoders` decode, `connections` limits the clients."""
