"""A button that hands a trace to ui.perfetto.dev. See `export.show`."""
