"""The control that downloads a page as one HTML file."""
