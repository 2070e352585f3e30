"""The HTTP service: `http` starts it and answers, `connections` limits clients, `bodies` reads, `workers` decode and compute."""
