"""From a path or URL to a Run: discovery, loading, caching, and one reader per file format."""
