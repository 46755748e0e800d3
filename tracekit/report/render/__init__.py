"""Documents -> text for a terminal, or JSON."""
