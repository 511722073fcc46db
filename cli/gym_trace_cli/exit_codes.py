"""What commands exit with; 2 is click's, for usage. A command that a signal stops exits with SIGNALLED + its number."""

FINE, ERROR, USAGE, DIFFERS, UNVERIFIABLE, DAMAGED = range(6)
SIGNALLED = 128
INTERRUPTED = SIGNALLED + 2  # Ctrl-C
READER_GONE = SIGNALLED + 13  # what programs that SIGPIPE ends leave behind
