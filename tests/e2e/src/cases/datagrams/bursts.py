"""Sends bursts of UDP datagrams by one system call each, or receives them.

Usage: bursts.py send ADDRESS PORT COUNT, or bursts.py receive ADDRESS PORT COUNT. Prints the SHA-256 of what was sent or
received. The receiver also prints the sizes of what it received at once, and of the datagrams in it.

The receiver answers each burst with the number of bytes that it has, and the sender waits for this. So no queue
overflows, and nothing is lost.
"""

import hashlib
import os
import socket
import struct
import sys

UDP_SEGMENT = 103
UDP_GRO = 104
DATAGRAM = 1200
BURST = 50 * DATAGRAM
HELLO = b"hello"
LIMIT = 60
ATTEMPTS = 300


def open_socket(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_DGRAM)


def greet(to, receiver):
    """Waits until the receiver listens. The socket is not connected, so a refusal is no error."""
    to.settimeout(0.2)
    for _ in range(ATTEMPTS):
        to.sendto(HELLO, receiver)
        try:
            if to.recv(100) == b"0":
                break
        except socket.timeout:
            pass
    else:
        sys.exit("the receiver does not answer")
    to.settimeout(LIMIT)
    to.connect(receiver)


def send(address, port, count):
    to = open_socket(address)
    greet(to, (address, port))
    to.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, DATAGRAM)
    digest = hashlib.sha256()
    for index in range(1, count + 1):
        burst = os.urandom(BURST)
        digest.update(burst)
        assert to.send(burst) == BURST
        # A greeting that was late has an answer too.
        while (came := to.recv(100)) == b"0":
            pass
        if came != b"%d" % (index * BURST):
            sys.exit(f"after {index * BURST} bytes the receiver has {came}")
    print(digest.hexdigest())


def receive(address, port, count):
    of = open_socket(address)
    of.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    of.bind((address, port))
    of.settimeout(LIMIT)
    digest = hashlib.sha256()
    length, sizes = 0, set()
    while length < count * BURST:
        data, controls, _, peer = of.recvmsg(65535, socket.CMSG_SPACE(4))
        if data == HELLO:
            of.sendto(b"0", peer)
            continue
        digest.update(data)
        length += len(data)
        datagram = len(data)
        for level, kind, value in controls:
            if (level, kind) == (socket.IPPROTO_UDP, UDP_GRO):
                (datagram,) = struct.unpack("i", value)
        sizes.add(f"{len(data)}/{datagram}")
        if length % BURST == 0:
            of.sendto(b"%d" % length, peer)
    print(digest.hexdigest(), *sorted(sizes))


{"send": send, "receive": receive}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
