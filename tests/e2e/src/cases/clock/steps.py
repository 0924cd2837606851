"""Looks at the clock every millisecond. When it was set, writes to the file what it says: nanoseconds since 1970, on a
line. A first line says when this began."""

import sys
import time

STEP_NS = 60 * 10**9

with open(sys.argv[1], "w") as notes:
    before = None
    while True:
        now = time.time_ns()
        # What the clock would have said when the system started.
        start = now - time.monotonic_ns()
        if before is None or abs(start - before) > STEP_NS:
            print(now, file=notes, flush=True)
            before = start
        time.sleep(0.001)
