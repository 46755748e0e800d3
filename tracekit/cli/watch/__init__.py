"""A training as it runs: its logs read as they grow, and its steps held against those before them."""
