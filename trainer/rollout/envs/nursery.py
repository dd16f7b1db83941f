"""The process from which the processes of --env_sandbox fork: it has the imports, and none of the trainer's variables.

`Nursery` is the trainer's end. Each environment has two processes. A supervisor is outside of the sandbox; it ends
when the trainer closes its connection. It then kills process 1 of the namespace, and the kernel kills all others there.
"""

import codecs
import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

from trainer.entry import end_with_parent
from trainer.errors import plain
from trainer.limits import limit, raise_limits, raised
from trainer.rollout.envs.environments import Source
from trainer.rollout.envs.sandbox import Box, Trees, confine, unshare_all, variables, visible_paths
from trainer.rollout.envs.serving import refuse, serve
from trainer.rollout.user_code import FOLDERS_OF_FILES

MODULE = "trainer.rollout.envs.nursery"
LINE_LENGTH = 4096  # characters of a line that are shown in one
MARK = "environment: "  # before each line that one prints
START_SECONDS = 120  # for the imports
SPREAD_SECONDS = 10  # for processes of a namespace to die


@dataclasses.dataclass
class Born:
    """A supervisor, and the connection to the process that it watches."""

    pid: int
    connection: socket.socket

    def end(self) -> None:
        """Close the connection, and wait until all processes of the namespace are gone."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)  # the supervisor sees it, and closes its end when all are gone
            self.connection.settimeout(SPREAD_SECONDS)
            while self.connection.recv(1 << 16):
                pass
        self.connection.close()


class Nursery:
    """One process for all environments of this process. It ends with it."""

    _lock, _here = threading.Lock(), None
    _owner = 0

    @classmethod
    def here(cls) -> "Nursery":
        with cls._lock:
            if cls._here is None or cls._owner != os.getpid() or cls._here._process.poll() is not None:
                cls._here, cls._owner = cls(), os.getpid()
            return cls._here

    def __init__(self):
        self._asks = threading.Lock()
        self._socket, its_end = socket.socketpair()
        command = [sys.executable, "-m", MODULE, str(its_end.fileno())]
        places = os.pathsep.join(path or os.getcwd() for path in sys.path if path not in FOLDERS_OF_FILES)
        self._process = subprocess.Popen(
            command,
            pass_fds=[its_end.fileno()],
            env=variables(dict(os.environ)) | {"PYTHONPATH": places},
            stdin=subprocess.DEVNULL,
        )
        its_end.close()
        self._socket.settimeout(START_SECONDS)

    def bear(self, source: Source, box: Box) -> Born:
        """Start the processes of an environment."""
        ours, its_end = socket.socketpair()
        asked = {"source": dataclasses.asdict(source), "box": dataclasses.asdict(box), "here": os.getcwd()}
        asked["limits"] = raised()
        with self._asks, its_end:
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [its_end.fileno()])
            return Born(int(self._socket.recv(64)), ours)


# --- in the nursery


def main(control: socket.socket) -> None:
    """Fork a supervisor for each request, until the trainer is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a supervisor ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the trainer, which then closes the connection
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            control.close()
            asked = json.loads(request)
            raise_limits(asked["limits"])
            try:
                supervise(descriptors[0], Source(**asked["source"]), Box(**asked["box"]), asked["here"])
            finally:
                os._exit(1)
        os.close(descriptors[0])
        control.send(str(child).encode())


def supervise(descriptor: int, source: Source, box: Box, here: str) -> None:
    """Start the environment in its sandbox, watch it, and end it with the trainer or with the connection."""
    end_with_parent()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(here)
    printed, prints = os.pipe()
    try:
        visible = visible_paths(source.name.partition(":")[0], box.paths)
        trees = unshare_all(visible, os.getpid())
    except OSError as error:
        refuse(socket.socket(fileno=descriptor), no_sandbox(error))
        return
    end_with_parent()  # again: a change of the user forgets it
    child = os.fork()
    if not child:
        _be_inside(descriptor, prints, source, box, trees)
    os.close(prints)
    for tree, _ in trees.values():
        os.close(tree)
    _watch(child, descriptor, printed)
    os._exit(0)


def no_sandbox(error: OSError) -> dict:
    found = f"this machine allows no sandbox: {error.strerror or error}"
    allowed = "Linux 5.12 or newer with user namespaces; or a container around the trainer, without the flag"
    return {"error": f": {found}", "parts": ["--env_sandbox", found, allowed]}


def _be_inside(descriptor: int, prints: int, source: Source, box: Box, trees: Trees) -> None:
    """Process 1 of the namespace. Does not return."""
    try:
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        connection = socket.socket(fileno=descriptor)
        try:
            confine(box, trees, descriptor)
        except OSError as error:
            refuse(connection, no_sandbox(error))
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            with open(source.name.partition(":")[0]):
                pass
        except PermissionError:  # root outside could read it
            found = f"the sandbox may not read {source.name}; it is never root"
            parts = ["--env_sandbox", found, "chmod a+rX for the file and its folder"]
            refuse(connection, {"error": f": {found}", "parts": parts})
            return
        except OSError:  # a module, or no file: `serve` says which
            pass
        serve(connection, source)
    finally:
        os._exit(0)


def _watch(child: int, descriptor: int, printed: int) -> None:
    """Return when the child is gone, with all that it has started. It ends when the other end of `descriptor` closes."""
    ending, passed_on = os.pidfd_open(child), Printed()
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.register(ending, select.POLLIN)
    poll.register(printed, select.POLLIN)
    while True:
        ready = {number for number, _ in poll.poll()}
        if printed in ready:
            text = os.read(printed, 1 << 12)
            passed_on.take(text)
            if not text:
                poll.unregister(printed)
        if descriptor in ready or ending in ready:
            break
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # for process 1, this waits for all processes of its namespace
    while select.select([printed], [], [], 0)[0] and (text := os.read(printed, 1 << 12)):
        passed_on.take(text)
    passed_on.take(b"", is_last=True)


class Printed:
    """What an environment prints, for the screen. Each line is marked, so that none looks like one of the trainer's.

    Only whole lines are written, since lines of others may come between. Characters that a terminal would obey are shown
    as escapes. After --limits printed_kb, nothing more is shown.
    """

    def __init__(self) -> None:
        self._left, self._line = limit("printed_kb") << 10, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes, is_last: bool = False) -> None:
        text = self._line + self._decoder.decode(data[: self._left])
        self._left = max(0, self._left - len(data))
        whole, end, self._line = text.rpartition("\n")
        if self._line and (is_last or len(self._line) > LINE_LENGTH):
            whole, end, self._line = text, "\n", ""
        shown = "".join(f"{MARK}{plain(line)}\n" for line in whole.replace("\r", "").split("\n")) if end else ""
        with contextlib.suppress(OSError):
            os.write(2, shown.encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
