"""Models and tokenizers from Hugging Face directories."""
