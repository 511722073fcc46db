"""What commands exit with: the one table, which `gym-trace --help` ends with.

Of several that are true the first counts of: differs, damaged, unverifiable. What is known to be wrong comes before
what is not known.
"""

FINE, ERROR, USAGE, DIFFERS, UNVERIFIABLE, DAMAGED = range(6)  # 2 is click's
SIGNALLED = 128  # and the number of the signal that stopped a command
INTERRUPTED = SIGNALLED + 2  # Ctrl-C
READER_GONE = SIGNALLED + 13  # what programs that SIGPIPE ends leave behind

TABLE = {
    str(FINE): "fine; what was compared is identical, or close enough",
    str(ERROR): "an error",
    str(USAGE): "wrong usage",
    str(DIFFERS): "episodes differ (verify, diff)",
    str(UNVERIFIABLE): "some episodes cannot be verified, and none differs or is damaged (verify)",
    str(DAMAGED): "something is damaged, and nothing differs",
    str(INTERRUPTED): "interrupted (Ctrl-C); 129 hung up, 143 terminated",
}
