"""Models of Hugging Face."""
