"""What `tracekit dashboard` runs: Streamlit's server on the app, which imports meanwhile what the pages need."""

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

    _answer_at_once()
    # The first visit would wait for it; a browser takes longer to start.
    threading.Thread(target=importlib.import_module, args=("dashboard.server.app",), daemon=True).start()
    cli.main(["run", str(APP), *sys.argv[1:]], prog_name="streamlit")


def _answer_at_once() -> None:
    """Let no small answer wait in the kernel for the browser to acknowledge the one before: 40 ms each.

    asyncio sees to it only for sockets made with the protocol's number, and Streamlit's is made without.
    """
    try:
        from streamlit.web.server.starlette import starlette_server

        bind = starlette_server._bind_socket
    except (ImportError, AttributeError):  # a Streamlit of another make: slower, but it serves
        return

    def bound(*args: Any, **kwargs: Any) -> socket.socket:
        listening = bind(*args, **kwargs)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # handed down to each connection
        return listening

    starlette_server._bind_socket = bound


if __name__ == "__main__":
    # Run by its path, for -m would take a folder named dashboard where one is for this one.
    sys.path.append(str(APP.parents[2]))
    main()
