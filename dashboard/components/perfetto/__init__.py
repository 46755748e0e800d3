"""A button that hands a trace to ui.perfetto.dev. See `perfetto.open_in_perfetto`."""
