"""The Streamlit dashboard: ``tracekit dashboard RUN…``."""
