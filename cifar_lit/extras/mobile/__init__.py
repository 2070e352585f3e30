"""Export to phones."""
