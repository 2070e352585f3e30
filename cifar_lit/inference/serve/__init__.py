"""The HTTP service: `http` answers requests, `connections` limits clients, `bodies` parses, `workers` decode and predict."""
