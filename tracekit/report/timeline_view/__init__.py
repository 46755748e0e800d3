"""The timeline as a browser shows it: its messages, its JavaScript, and a scene embedded in one HTML page."""
