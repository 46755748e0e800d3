"""What Streamlit runs, apart from ``pages/``: next to the script, Streamlit would serve that folder by itself."""
