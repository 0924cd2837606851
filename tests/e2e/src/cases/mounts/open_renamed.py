"""Reads many files that the host renames meanwhile.

Usage: open_renamed.py DIRECTORY COUNT. Opens the files 0 to COUNT - 1 of the directory, in processes of 500 each, says
"ready", waits for a line, and reads each file by its descriptor.
"""

import os
import sys

EACH = 500


def wrong(opened):
    """How many files are not as they were, and the first of them."""
    found = []
    for name, descriptor in opened:
        try:
            content = os.read(descriptor, 100).decode()
        except OSError as error:
            content = error.strerror
        if content != f"{name}\n":
            found.append(f"{name}: {content}")
    return f"{len(found)} of {len(opened)} are not as they were {' '.join(found[:1])}".strip()


directory, count = sys.argv[1], int(sys.argv[2])
children = []
for first in range(0, count, EACH):
    to_child, go = os.pipe()
    answer, to_parent = os.pipe()
    if os.fork() == 0:
        opened = [(name, os.open(f"{directory}/{name}", os.O_RDONLY)) for name in range(first, first + EACH)]
        os.write(to_parent, b"ready")
        os.read(to_child, 1)
        os.write(to_parent, wrong(opened).encode())
        os._exit(0)
    children.append((go, answer))
for _, answer in children:
    os.read(answer, 5)
print("ready", flush=True)
sys.stdin.readline()
for go, answer in children:
    os.write(go, b"x")
    print(os.read(answer, 1000).decode())
