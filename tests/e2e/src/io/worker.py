"""Does work with files and the network in a container or a VM, as its host asks over TCP, and says how long each took.

Usage: worker.py ADDRESS PORT. A line of the host is the name of a function below and its arguments. The worker answers
with the number that the function returned, or the seconds that it took, or with an error.
"""

import glob
import io
import mmap
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
# Of the files that are read and written, and of the block volume.
FILE_SIZE = 16 * MIB
ACCEPTS_PORT = 8081
POSTGRESQL = glob.glob("/usr/lib/postgresql/*/bin")[0]
AS_POSTGRES = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
# What a server does in the background would disturb the other rows.
DATABASE = ["-c", "unix_socket_directories=/tmp", "-c", "autovacuum=off", "-c", "checkpoint_timeout=1d"]
# The servers, and the ports that they listen on.
SERVERS = {
    8080: ["nginx", "-c", "/srv/nginx.conf"],
    6379: ["redis-server", "--dir", "/tmp", "--save", "", "--appendonly", "no", "--protected-mode", "no"],
    5432: [*AS_POSTGRES, f"{POSTGRESQL}/postgres", "-D", "/data/database", *DATABASE],
}
running = []


def prepare(files, bytes_of_each):
    """Makes the files that are read, written and unpacked. Starts the servers."""
    for directory in DIRECTORIES:
        for name in ["file", "still"]:
            with open(f"{directory}/{name}", "wb") as file:
                for _ in range(FILE_SIZE // MIB):
                    file.write(os.urandom(MIB))
        with tarfile.open(f"{directory}/files.tar", "w") as archive:
            for index in range(int(files)):
                member = tarfile.TarInfo(f"unpacked/{index % 10}/file-{index}")
                member.size = int(bytes_of_each)
                archive.addfile(member, io.BytesIO(os.urandom(member.size)))
    with open("/srv/hello.c", "w") as source:
        source.write('#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n')
    running.extend(subprocess.Popen(server, stdout=subprocess.DEVNULL) for server in SERVERS.values())
    for port in SERVERS:
        wait_until(f"a server listens on port {port}", lambda: is_open(port))
    ready = [f"{POSTGRESQL}/pg_isready", "-q", "-h", "/tmp"]
    wait_until("the database is ready", lambda: subprocess.run(ready).returncode == 0)


def is_open(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    except ConnectionRefusedError:
        return False


def wait_until(what, holds):
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise TimeoutError(f"not after a minute: {what}")


def memory_kib():
    """The memory that this system has, in KiB."""
    with open("/proc/meminfo") as lines:
        return int(next(lines).split()[1])


def at_random(count, do):
    random = Random(1)
    for _ in range(int(count)):
        do(random.randrange(FILE_SIZE // 4096) * 4096)


def write_at_random(directory, count):
    file = os.open(f"{directory}/file", os.O_WRONLY)
    data = os.urandom(4096)
    at_random(count, lambda offset: os.pwrite(file, data, offset))
    os.close(file)


def read_at_random(path, count):
    file = os.open(path, os.O_RDONLY)
    at_random(count, lambda offset: os.pread(file, 4096, offset))
    os.close(file)


def read(path):
    file = os.open(path, os.O_RDONLY)
    while os.read(file, MIB):
        pass
    os.close(file)


def read_again(path, count):
    """Reads the whole file. What it does then counts."""
    read(path)
    begin = time.monotonic()
    read_at_random(path, count)
    return time.monotonic() - begin


def with_disk(path, length, do):
    """Calls `do` with a descriptor of the block device, and with memory as O_DIRECT needs it."""
    file = os.open(path, os.O_RDWR | os.O_DIRECT)
    memory = mmap.mmap(-1, length)
    memory.write(os.urandom(length))
    begin = time.monotonic()
    do(file, memory)
    took = time.monotonic() - begin
    os.close(file)
    return took


def read_blocks_at_random(path, count):
    def run(file, memory):
        at_random(count, lambda offset: os.preadv(file, [memory], offset))

    return with_disk(path, 4096, run)


def write_blocks_at_random(path, count):
    def run(file, memory):
        at_random(count, lambda offset: os.pwritev(file, [memory], offset))

    return with_disk(path, 4096, run)


def read_blocks(path, mib):
    def run(file, memory):
        for index in range(int(mib)):
            assert os.preadv(file, [memory], index * MIB) == MIB

    return with_disk(path, MIB, run)


def write_blocks(path, mib):
    def run(file, memory):
        for index in range(int(mib)):
            assert os.pwritev(file, [memory], index * MIB) == MIB

    return with_disk(path, MIB, run)


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


def start_node():
    subprocess.run(["node", "-e", "for (const m of ['http', 'crypto', 'zlib', 'child_process']) require(m)"], check=True)


def start_java():
    java = "/usr/lib/jvm/java-21-openjdk-amd64/bin/java"
    subprocess.run([java, "-version"], check=True, stderr=subprocess.DEVNULL)


def compile_program():
    subprocess.run(["gcc", "-o", "/srv/hello", "/srv/hello.c"], check=True)


def pgbench(count, *flags):
    """Transactions of one client, which is here too. Its own start does not count."""
    client = [f"{POSTGRESQL}/pgbench", "-n", "-t", count, "-h", "/tmp", "-U", "postgres", *flags, "postgres"]
    output = subprocess.run(client, check=True, stdout=subprocess.PIPE, text=True).stdout
    rate = next(line.split()[2] for line in output.splitlines() if line.startswith("tps = "))
    return int(count) / float(rate)


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


def datagrams():
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer.settimeout(60)
    peer.connect((sys.argv[1], int(sys.argv[2])))
    return peer


def send_datagrams(bursts, burst, length):
    """The host answers each burst. So no more are on their way than a socket's buffer holds."""
    with datagrams() as peer:
        data = b"x" * int(length)
        begin = time.monotonic()
        for _ in range(int(bursts)):
            for _ in range(int(burst)):
                peer.send(data)
            peer.recv(1)
        return time.monotonic() - begin


def receive_datagrams(bursts, burst, length):
    """The host sends a burst when it gets a datagram."""
    with datagrams() as peer:
        begin = time.monotonic()
        for _ in range(int(bursts)):
            peer.send(b".")
            for _ in range(int(burst)):
                assert len(peer.recv(PIECE)) == int(length)
        return time.monotonic() - begin


def accept(count):
    """Closes each connection when the host has closed it."""
    for _ in range(int(count)):
        connection, _ = accepts.accept()
        with connection:
            assert connection.recv(1) == b""


accepts = socket.create_server(("", ACCEPTS_PORT))
orders = stream()
for line in orders.makefile("r"):
    name, *arguments = line.split()
    begin = time.monotonic()
    try:
        answer = globals()[name](*arguments)
    except Exception as error:
        answer = repr(error)
    if answer is None:
        answer = time.monotonic() - begin
    orders.sendall(f"{answer}\n".encode())
