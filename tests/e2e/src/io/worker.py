"""Does work with files and the network in a container, as its host asks over TCP, and says how long each took.

Usage: worker.py ADDRESS PORT. A line of the host is the name of a function below and its arguments. The worker answers
with the seconds that the function returned, or that it took.
"""

import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from random import Random

PIECE = 128 * 1024
MIB = 1 << 20
# Volume and root.
DIRECTORIES = ["/data", "/srv"]
FILE_SIZE = 16 * MIB


def prepare(files, bytes_of_each):
    """Makes the files that are read, written and unpacked."""
    for directory in DIRECTORIES:
        with open(f"{directory}/file", "wb") as file:
            for _ in range(FILE_SIZE // MIB):
                file.write(os.urandom(MIB))
        with tarfile.open(f"{directory}/files.tar", "w") as archive:
            for index in range(int(files)):
                member = tarfile.TarInfo(f"unpacked/{index % 10}/file-{index}")
                member.size = int(bytes_of_each)
                archive.addfile(member, io.BytesIO(os.urandom(member.size)))
    with open("/srv/hello.c", "w") as source:
        source.write('#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n')


def at_random(count, do):
    random = Random(1)
    for _ in range(int(count)):
        do(random.randrange(FILE_SIZE // 4096) * 4096)


def write_at_random(directory, count):
    file = os.open(f"{directory}/file", os.O_WRONLY)
    data = os.urandom(4096)
    at_random(count, lambda offset: os.pwrite(file, data, offset))
    os.close(file)


def read_at_random(directory, count):
    file = os.open(f"{directory}/file", os.O_RDONLY)
    at_random(count, lambda offset: os.pread(file, 4096, offset))
    os.close(file)


def read(path):
    file = os.open(path, os.O_RDONLY)
    while os.read(file, MIB):
        pass
    os.close(file)


def unpack(directory):
    begin = time.monotonic()
    subprocess.run(["tar", "-xf", f"{directory}/files.tar", "-C", directory], check=True)
    took = time.monotonic() - begin
    shutil.rmtree(f"{directory}/unpacked")
    return took


def stat_all(directory):
    """Lists each directory, and asks for the attributes of each file, as find, du and git do."""
    count = 0
    for below in os.scandir(directory):
        for entry in os.scandir(below.path):
            entry.stat()
            count += 1
    assert count > 0


def sync(threads, count):
    def write(thread):
        file = os.open(f"/data/synced-{thread}", os.O_WRONLY | os.O_CREAT)
        for index in range(int(count)):
            os.pwrite(file, b"x" * 4096, index * 4096)
            os.fsync(file)
        os.close(file)

    running = [threading.Thread(target=write, args=[thread]) for thread in range(int(threads))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def start_python():
    subprocess.run(["python3", "-c", "import ctypes,subprocess,tempfile,socket"], check=True)


def compile_program():
    subprocess.run(["gcc", "-o", "/srv/hello", "/srv/hello.c"], check=True)


def stream():
    return socket.create_connection((sys.argv[1], int(sys.argv[2])))


def send(mib):
    with stream() as to:
        begin = time.monotonic()
        for _ in range(int(mib) * MIB // PIECE):
            to.sendall(b"x" * PIECE)
        to.shutdown(socket.SHUT_WR)
        assert to.recv(1) == b"."
        return time.monotonic() - begin


def receive(mib):
    with stream() as of:
        begin = time.monotonic()
        length = 0
        while piece := of.recv(PIECE):
            length += len(piece)
        assert length == int(mib) * MIB
        return time.monotonic() - begin


def round_trips(count):
    with stream() as to:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = time.monotonic()
        for _ in range(int(count)):
            to.sendall(b".")
            assert to.recv(1) == b"."
        return time.monotonic() - begin


orders = stream()
for line in orders.makefile("r"):
    name, *arguments = line.split()
    begin = time.monotonic()
    took = globals()[name](*arguments)
    if took is None:
        took = time.monotonic() - begin
    orders.sendall(f"{took}\n".encode())
