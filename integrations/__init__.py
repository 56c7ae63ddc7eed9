"""The Hugging Face side of hf_laer."""
