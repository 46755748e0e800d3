"""What Streamlit runs, apart from ``pages/``: a folder of that name next to the script would be pages of Streamlit's."""
