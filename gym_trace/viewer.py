"""View traces in a browser: with a server, as a page to send, or as a static site."""

from __future__ import annotations

from gym_trace.tools.viewer.api import serve
from gym_trace.tools.viewer.saving import MOST_BYTES, SavedPage, save_page
from gym_trace.tools.viewer.site import SavedSite, save_site

__all__ = ["MOST_BYTES", "SavedPage", "SavedSite", "save_page", "save_site", "serve"]
