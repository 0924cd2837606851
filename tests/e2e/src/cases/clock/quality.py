"""Prints what adjtimex(2) says of the clock's quality: status, maxerror, esterror. With three arguments, sets them
afterwards."""

import ctypes
import os
import sys

ADJ_MAXERROR, ADJ_ESTERROR, ADJ_STATUS = 0x4, 0x8, 0x10


class Timex(ctypes.Structure):
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        # What is not used here.
        ("rest", ctypes.c_char * 256),
    ]


def adjtimex(timex):
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        sys.exit(os.strerror(ctypes.get_errno()))


timex = Timex()
adjtimex(timex)
print(timex.status, timex.maxerror, timex.esterror)
if sys.argv[1:]:
    status, maxerror, esterror = map(int, sys.argv[1:])
    adjtimex(Timex(ADJ_MAXERROR | ADJ_ESTERROR | ADJ_STATUS, 0, 0, maxerror, esterror, status))
