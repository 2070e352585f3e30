"""Exchange trained nets with the Hugging Face hub."""
