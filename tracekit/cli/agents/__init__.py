"""The server for coding agents: answers about runs as small JSON values, by the Model Context Protocol."""
