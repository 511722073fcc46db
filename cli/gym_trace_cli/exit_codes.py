"""Exit codes of all commands; `gym-trace --help` ends with this table.

If several apply, the first of these wins: differs, damaged, unverifiable.
"""

FINE, ERROR, USAGE, DIFFERS, UNVERIFIABLE, DAMAGED = range(6)  # 2 is click's
UNPROVED = DAMAGED
SIGNALLED = 128  # plus the signal number
INTERRUPTED = SIGNALLED + 2  # Ctrl-C
READER_GONE = SIGNALLED + 13  # SIGPIPE

TABLE = {
    str(FINE): "success; everything compared matches",
    str(ERROR): "error, or findings (lint)",
    str(USAGE): "wrong usage",
    str(DIFFERS): "something differs (verify, diff, shell, audit --require, train --verify, proof verify)",
    str(UNVERIFIABLE): "episodes cannot be verified, the others match (verify)",
    str(DAMAGED): "damage found, or a line 'not proved' (train --verify, proof verify); nothing differs",
    str(INTERRUPTED): "interrupted (Ctrl-C); 129 hung up, 143 terminated",
}
