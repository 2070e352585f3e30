"""Review of labels in a browser: `journal` stores decisions, `queue` ranks images, `http` serves the page."""
