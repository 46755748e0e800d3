"""What `tracekit dashboard` runs: Streamlit's server on the app, which preloads the imports of the pages."""

import importlib
import socket
import sys
import threading
from pathlib import Path
from typing import Any

APP = Path(__file__).with_name("app.py")


def main() -> None:
    """Serve the app with Streamlit's own options, then ``--`` and the runs. Returns when the server ends."""
    from streamlit.web import cli

    _disable_nagle()
    # Otherwise the first visit would wait for the imports; a browser takes longer to start.
    threading.Thread(target=importlib.import_module, args=("dashboard.server.frame",), daemon=True).start()
    cli.main(["run", str(APP), *sys.argv[1:]], prog_name="streamlit")


def _disable_nagle() -> None:
    """Set TCP_NODELAY: without it a small response waits up to 40 ms for the acknowledgement of the previous one.

    asyncio sets it only on sockets created with an explicit protocol, and Streamlit's is created without.
    """
    try:
        from streamlit.web.server.starlette import starlette_server

        bind = starlette_server._bind_socket
    except (ImportError, AttributeError):  # another version of Streamlit: slower, but it works
        return

    def bound(*args: Any, **kwargs: Any) -> socket.socket:
        listening = bind(*args, **kwargs)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by each connection
        return listening

    starlette_server._bind_socket = bound


if __name__ == "__main__":
    # Run by its path: -m would run a package named dashboard of the current folder instead.
    sys.path.append(str(APP.parents[2]))
    main()
