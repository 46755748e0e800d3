"""The documentation site: what `zensical.toml` needs besides the pages in docs/."""
