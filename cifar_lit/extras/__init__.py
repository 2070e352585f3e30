"""Applications beside the trainer. They import the core, and the core imports none of them."""
