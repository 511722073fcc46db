"""Whether tests take their time: with GYM_TRACE_LONG=1, as in make test-long."""

import os

LONG = os.environ.get("GYM_TRACE_LONG") == "1"
