"""Pieces of the pages that Streamlit doesn't have: plain JavaScript and CSS of ours, shipped as they are."""
