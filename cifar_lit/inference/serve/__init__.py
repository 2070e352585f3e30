"""The HTTP service: `service` starts and watches it, `http` has the connections, `images` the decoding, `net` the answers."""
