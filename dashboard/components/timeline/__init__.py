"""The timeline on a canvas: its files, joined and registered with Streamlit. See `timeline.timeline`."""
