"""The tests of the viewer need its extra, what drives its server, and Pillow."""

from importlib.util import find_spec

NEEDED = ("starlette", "uvicorn", "httpx2", "PIL")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py"]
