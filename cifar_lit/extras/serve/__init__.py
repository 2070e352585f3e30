"""The HTTP service: `http` answers, `service` checks and limits, `bodies` parses, `workers` decode and predict."""
