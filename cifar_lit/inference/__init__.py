"""Use a trained net: classify images, explain predictions, export it, serve it over HTTP."""
