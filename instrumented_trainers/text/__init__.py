"""Text to train on: read from files, tokenized, packed into sequences, and divided among the ranks."""
