"""Report to text, JSON and HTML: ``render(report) -> str``, one module per format."""
