"""People's own images: folders and tables of files, decoded once and cached."""
