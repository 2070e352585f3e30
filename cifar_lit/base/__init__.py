"""What every folder may use. It imports nothing of ours."""
