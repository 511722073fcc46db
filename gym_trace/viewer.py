"""View traces in a browser: with a server, or as a page to send."""

from __future__ import annotations

from gym_trace.tools.viewer.api import serve
from gym_trace.tools.viewer.saving import MOST_BYTES, SavedPage, save_page

__all__ = ["MOST_BYTES", "SavedPage", "save_page", "serve"]
