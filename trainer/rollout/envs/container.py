"""--env_container: each environment in a container, or in any other sandbox that a command starts.

The command gets `python -m trainer.rollout.envs.container ENVIRONMENT` as its last arguments, as `docker run -i IMAGE` wants.
What it starts speaks by its standard input and output, and prints by standard error. It ends when its input closes.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading

from trainer.errors import UserError
from trainer.rollout.envs.environments import Source
from trainer.rollout.envs.nursery import Born, Printed
from trainer.rollout.envs.sandbox import variables
from trainer.rollout.envs.serving import serve

FLAG = "--env_container"
MODULE = "trainer.rollout.envs.container"
# of the trainer's variables, what docker, podman and the like need besides those of a sandbox. None is a key
OF_RUNNERS = ("HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH",
    "DOCKER_TLS_VERIFY", "CONTAINER_HOST", "CONTAINERS_CONF")  # fmt: skip
END_SECONDS = 10  # for a container to end, and again after SIGTERM


def words_of(command: str) -> list[str]:
    """The words of the flag, as a shell splits them. Raises UserError without any."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(FLAG, f"{command}: {error}", "a command such as 'docker run --rm -i IMAGE'") from None
    if not words:
        raise UserError(FLAG, "no command", "a command such as 'docker run --rm -i IMAGE'")
    return words


@dataclasses.dataclass
class Contained(Born):
    """The process of the command, and the connection to what it started."""

    process: subprocess.Popen
    printing: threading.Thread

    def end(self) -> None:
        """Close its input and wait. One that does not end gets SIGTERM, and SIGKILL at last."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        for number in (signal.SIGTERM, signal.SIGKILL, None):
            try:
                self.process.wait(END_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if number is not None:
                    os.killpg(self.process.pid, number)
        self.printing.join(END_SECONDS)
        self.connection.close()


def bear(command: list[str], source: Source) -> Contained:
    """Start a container for an environment. Raises OSError if there is no such command."""
    ours, its_end = socket.socketpair()
    known = {name: os.environ[name] for name in OF_RUNNERS if name in os.environ}
    asked = json.dumps(dataclasses.asdict(source))
    with its_end:
        process = subprocess.Popen(
            [*command, "python", "-m", MODULE, asked],
            stdin=its_end,
            stdout=its_end,
            stderr=subprocess.PIPE,
            env=variables(dict(os.environ)) | known,
            start_new_session=True,
        )
    printing = threading.Thread(target=_print, args=(process.stderr,), daemon=True)
    printing.start()
    return Contained(process.pid, ours, process, printing)


def _print(stream) -> None:
    """Show what an environment, or the command that starts it, prints."""
    printed = Printed()
    while data := stream.read1(1 << 12):
        printed.take(data)
    printed.take(b"", is_last=True)


# --- in the container


class Streams:
    """Standard input and output, with the methods of a socket that frames need."""

    def __init__(self) -> None:
        self._input, self._output = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # no program of the environment reads requests
        os.dup2(2, 1)  # what it prints is no answer
        sys.stdout.reconfigure(line_buffering=True)

    def settimeout(self, seconds: float | None) -> None:
        """Wait for ever: the trainer has the deadline, and closes the input."""

    def recv(self, size: int) -> bytes:
        return os.read(self._input, size)

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._output, left) :]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # process 1 of a container would ignore it
    with contextlib.suppress(BrokenPipeError):
        serve(Streams(), Source(**json.loads(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
