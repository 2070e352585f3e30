"""The HTTP service: `http` answers, `connections` limits clients, `bodies` parses, `workers` decode and predict."""
