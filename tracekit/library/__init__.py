"""The library: a run that answers by itself, for notebooks and scripts. Each answer shows itself in a notebook."""
