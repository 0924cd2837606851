"""Does one thing many times in a container, as its host asks over TCP.

Usage: worker.py ADDRESS PORT. A line of the host is a name of a function below, with or without "prepare_" in front, and
a number. The worker answers "done" after it has done the thing that many times.
"""

import io
import os
import socket
import socketserver
import subprocess
import sys
import tarfile

PIECE = 128 * 1024
MIB = 1 << 20
files = 0
cold_files = 0


def start_python(count):
    for _ in range(count):
        command = ["python3", "-c", "import ctypes,subprocess,tempfile,socket"]
        subprocess.run(command, check=True)


def execute_true(count):
    for _ in range(count):
        child = os.posix_spawn("/bin/true", ["true"], os.environ)
        assert os.waitpid(child, 0)[1] == 0


def compile_program(count):
    for _ in range(count):
        subprocess.run(["gcc", "-o", "/srv/hello", "/srv/hello.c"], check=True)


def new_file(count):
    global files
    for _ in range(count):
        files += 1
        file = os.open(f"/srv/new-{files}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(file, b"x" * 4096)
        os.close(file)


def append_line(count):
    file = os.open("/srv/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(count):
        os.write(file, b"x" * 79 + b"\n")
    os.close(file)


def prepare_unpack(count):
    global files
    with tarfile.open("/srv/files.tar", "w") as archive:
        for _ in range(count):
            files += 1
            entry = tarfile.TarInfo(f"unpacked-{files}")
            entry.size = 2048
            archive.addfile(entry, io.BytesIO(b"x" * entry.size))


def unpack(count):
    subprocess.run(["tar", "-xf", "/srv/files.tar", "-C", "/data"], check=True)


def read_file(path):
    file = os.open(path, os.O_RDONLY)
    length = 0
    while piece := os.read(file, PIECE):
        length += len(piece)
    os.close(file)
    assert length == MIB


def read_cold(count):
    """Each file of the image is read once."""
    global cold_files
    for _ in range(count):
        read_file(f"/srv/cold-{cold_files}")
        cold_files += 1


def prepare_read_warm(count):
    read_file("/srv/warm")


def read_warm(count):
    for _ in range(count):
        read_file("/srv/warm")


def stream():
    return socket.create_connection((sys.argv[1], int(sys.argv[2])))


def send(count):
    with stream() as to:
        for _ in range(count * MIB // PIECE):
            to.sendall(b"x" * PIECE)
        to.shutdown(socket.SHUT_WR)
        assert to.recv(1) == b"."


def receive(count):
    with stream() as of:
        length = 0
        while piece := of.recv(PIECE):
            length += len(piece)
        assert length == count * MIB


class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        while self.rfile.readline().strip():
            pass
        with open("/srv/page", "rb") as page:
            text = page.read()
        self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)


def answer_http(count):
    for _ in range(count):
        server.handle_request()


server = socketserver.TCPServer(("", 80), Answer)
orders = stream()
lines = orders.makefile("r")
for line in lines:
    name, count = line.split()
    globals()[name](int(count))
    orders.sendall(b"done\n")
