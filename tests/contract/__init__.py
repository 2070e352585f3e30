"""What users rely on, seen through the command line alone: these tests know nothing of the package's inside."""
