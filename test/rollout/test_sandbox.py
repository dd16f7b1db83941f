"""--env_sandbox: what code in it tries, and does not reach. As root, and as another user where this machine has one."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from launch import ROOT

from trainer import limits
from trainer.errors import UserError
from trainer.rollout.envs import nursery, sandbox
from trainer.rollout.envs.call_filter import calls
from trainer.rollout.envs.env_process import ProcessEnvironment, _read_step, check_sandbox
from trainer.rollout.envs.environments import Failure, Response, Source, Step
from trainer.rollout.envs.sandbox import Box
from trainer.rollout.peers import BadAnswer
from trainer.rollout.user_code import import_code

PLAIN_USER = 65534
ATTACKS = """
import ctypes, gc, json, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
facts = json.loads(open(os.path.join(os.path.dirname(__file__), "facts.json")).read())

def tried(*attempts):
    "What worked of several attempts."
    worked = []
    for number, attempt in enumerate(attempts):
        try:
            if attempt() not in (None, False):
                worked.append(number)
        except BaseException:
            pass
    return worked

def connection():
    return next(o for o in gc.get_objects() if isinstance(o, socket.socket) and o.fileno() >= 0)

def call(number, *values):
    return libc.syscall(number, *values) == 0 or None

class Attacks:
    def network(self):
        return tried(lambda: socket.create_connection(("127.0.0.1", facts["port"]), 2))
    def path_socket(self):
        def join():
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(facts["path"])
                return True
        def abstract():
            with socket.socket(socket.AF_UNIX) as end:
                end.connect("\\0" + facts["abstract"])
                return True
        return tried(join, abstract)
    def join_namespace(self):
        def join(kind, flag):
            place = os.open(f"/proc/{facts['pid']}/ns/{kind}", os.O_RDONLY)
            return libc.setns(place, flag) == 0 or None
        return tried(lambda: join("net", 0x40000000), lambda: join("mnt", 0x20000),
                     lambda: libc.unshare(0x10000000) == 0 or None, lambda: libc.unshare(0x20000) == 0 or None)
    def memory(self):
        def poke():
            with open(f"/proc/{facts['pid']}/mem", "r+b") as file:
                file.seek(facts["address"])
                return file.write(b"X")
        def attach():
            return libc.ptrace(16, facts["pid"], 0, 0) == 0 or None
        return tried(poke, attach, lambda: os.listdir(f"/proc/{facts['pid']}"))
    def signals(self):
        def stop(pid):
            os.kill(pid, 0)
            return True
        return tried(lambda: stop(facts["pid"]), lambda: stop(os.getppid()) if os.getppid() else None)
    def keys(self):
        held = dict(os.environ)
        held |= {str(n): text for n, text in enumerate(open("/proc/self/environ").read().split("\\0"))}
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                held[pid] = open(f"/proc/{pid}/environ").read()
            except (OSError, UnicodeDecodeError):
                pass
        return [name for name, text in held.items() if "secret-key" in text]
    def files(self):
        def read(path):
            return open(path).read() and True
        def write(path):
            with open(path, "w") as file:
                return file.write("x")
        return tried(lambda: read("/etc/shadow"), lambda: read(facts["private"]), lambda: write(facts["folder"] + "/new"),
                     lambda: write("/usr/new"), lambda: os.chroot("/") or True,
                     lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 or None)
    def system(self):
        "Opened for writing only: a program in core_pattern would run as root of the machine."
        found = [f"{folder}/{name}" for folder, _, names in os.walk("/proc/sys") for name in names]
        found += [f"/proc/{name}" for name in os.listdir("/proc") if not name.isdecimal() and os.path.isfile(f"/proc/{name}")]
        assert "/proc/sys/kernel/core_pattern" in found
        written = []
        for path in found:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                written.append(path)
            except OSError:
                pass
        return written
    def root(self):
        "Whether it is root outside, or in a group of root."
        found = [kind for kind in "ug" if open(f"/proc/self/{kind}id_map").read().split()[1] == "0"]
        return found + [group for group in os.getgroups() if group == 0]
    def rights(self):
        status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
        whole = [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
        return [] if set(whole) == {"0" * 16} and status["NoNewPrivs"] == "1" and status["Seccomp"] == "2" else [status]
    def processes(self):
        born, limit = 0, 400
        try:
            for _ in range(limit):
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                born += 1
        except OSError:
            return []
        return [born]
    def threads(self):
        try:
            for _ in range(400):
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        except RuntimeError:
            return []
        return ["no limit"]
    def disk(self):
        try:
            for number in range(64):
                with open(f"/tmp/{number}", "wb") as file:
                    file.write(bytes(1 << 20))
        except OSError:
            return []
        return ["64 MB"]
    def shared_memory(self):
        try:
            for number in range(64):
                with open(f"/dev/shm/{number}", "wb") as file:
                    file.write(bytes(1 << 20))
        except OSError:
            return []
        return ["64 MB"]
    def file_size(self):
        with open("/tmp/sparse", "wb") as file:
            return tried(lambda: file.truncate(1 << 30))
    def address_space(self):
        return tried(lambda: bytearray(3 << 30))
    def open_files(self):
        return tried(lambda: [os.open("/dev/null", os.O_RDONLY) for _ in range(256)])
    def hidden_memory(self):
        "Memory that is in no address space and in no file of the sandbox."
        def held(number):
            return libc.syscall(number, *((b"x", 0) if number == facts["memfd"] else (0, 4096, 0o1600))) >= 0 or None
        def gift():
            return libc.syscall(facts["vmsplice"], os.pipe()[1], None, 0, 0) == 0 or None
        def buffer():
            with socket.socketpair()[0] as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                return True
        return tried(lambda: held(facts["memfd"]), *(lambda n=n: held(n) for n in facts["queues"]), gift, buffer)
    def cpu(self):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass
        return ["20 s"]
    def later(self):
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1.5); open({facts['folder']!r} + '/late', 'w')"],
                         start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600.25)
            os._exit(0)
        return []
    # what it sends
    def half_a_frame(self):
        connection().sendall(b"\\0\\0\\1\\0x")
        time.sleep(60)
    def slow_bytes(self):
        connection().sendall(b"\\0\\0\\1\\0")
        while True:
            connection().sendall(b" ")
            time.sleep(0.1)
    def huge_frame(self):
        connection().sendall(b"\\x7f\\xff\\xff\\xff")
        while True:
            connection().sendall(b" " * (1 << 20))
    def exits(self):
        os._exit(0)

RAW = facts["raw"]

class Environment:
    def reset(self, task):
        self.does = task["does"]
        return [{"role": "user", "content": "?"}]
    def step(self, response):
        if self.does in RAW:
            data = RAW[self.does].encode("latin-1")
            connection().sendall(len(data).to_bytes(4, "big") + data)
            time.sleep(60)
        if self.does == "nan":
            return float("nan"), True
        return [{"role": "user", "content": json.dumps(getattr(Attacks(), self.does)())}]
"""
GOOD = {"messages": [], "reward": 1.0, "done": True, "metrics": {}}
RAW = {
    "empty object": "{}",
    "list": "[]",
    "no JSON": "x",
    "deep": "[" * 100_000,
    "not UTF-8": "\xff",
    "surrogate": json.dumps({**GOOD, "done": False, "messages": [{"role": "user", "content": "\ud800"}]}),
    "reward NaN": json.dumps({**GOOD, "reward": float("nan")}),
    "reward too large": json.dumps({**GOOD, "reward": 1e300}),
    "reward text": json.dumps({**GOOD, "reward": "1"}),
    "reward true": json.dumps({**GOOD, "reward": True}),
    "done text": json.dumps({**GOOD, "done": "yes"}),
    "messages text": json.dumps({**GOOD, "done": False, "messages": "hello"}),
    "messages of the model": json.dumps({**GOOD, "done": False, "messages": [{"role": "assistant", "content": "x"}]}),
    "metrics list": json.dumps({**GOOD, "metrics": [1]}),
    "metric infinite": json.dumps({**GOOD, "metrics": {"a": float("inf")}}),
    "metric name": json.dumps({**GOOD, "metrics": {"\x1b[2J": 1}}),
    "metrics without end": json.dumps({**GOOD, "metrics": {str(n): 1 for n in range(10_000)}}),
}
REACH = ("network", "path_socket", "join_namespace", "memory", "signals", "keys", "files", "rights", "system", "root")
LIMITS = ("processes", "threads", "disk", "shared_memory", "file_size", "address_space", "open_files", "hidden_memory")


@pytest.fixture(scope="module")
def folder():
    """An environment that attacks this process, and what it could reach.

    Another user can read it. The folders of pytest are private, at a depth that depends on its workers.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox") as name:
        os.chmod(name, 0o755)
        yield from _attacked(Path(name))


def _attacked(folder: Path):
    (folder / "env").mkdir()
    (folder / "env/env.py").write_text(ATTACKS)
    (folder / "private").write_text("secret-key")
    listening, at_path, abstract = (
        socket.create_server(("127.0.0.1", 0)),
        *(socket.socket(socket.AF_UNIX) for _ in "ab"),
    )
    at_path.bind(str(folder / "env/socket"))
    abstract.bind(f"\0{folder}")
    for each in (at_path, abstract):
        each.listen()
    buffer = bytearray(b"untouched")
    facts = {
        "pid": os.getpid(), "port": listening.getsockname()[1], "path": str(folder / "env/socket"), "raw": RAW,
        "abstract": str(folder), "folder": str(folder / "env"), "private": str(folder / "private"),
        "address": id(buffer), "memfd": calls()["memfd_create"], "vmsplice": calls()["vmsplice"],
        "queues": [calls()[name] for name in ("shmget", "msgget", "semget")],
    }  # fmt: skip
    (folder / "env/facts.json").write_text(json.dumps(facts))
    yield folder
    for each in (listening, at_path, abstract):
        each.close()


def step_of(folder: Path, does: str, timeout: float = 60.0, **box):
    """Answer and environment of one step. `timeout` is for the step: a busy machine may start a process late."""
    env = ProcessEnvironment(Source(str(folder / "env/env.py")), 1024, 60.0, Box(**box))
    found = env.reset({"does": does})
    assert found == [{"role": "user", "content": "?"}], found
    env._timeout = timeout
    try:
        return env.step(Response("x", "x", [], True)), env
    finally:
        env.close()


@pytest.mark.parametrize("does", REACH)
def test_it_reaches_nothing_of_the_trainer(does, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-key")
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    step, env = step_of(folder, does)
    assert not isinstance(step, Failure), step
    assert json.loads(step[0][0]["content"]) == [] and env.metrics["lost"] == 0


@pytest.mark.parametrize("does", LIMITS)
def test_its_resources_are_limited(does, folder):
    step, _ = step_of(folder, does, processes=64, disk_mb=16)
    assert isinstance(step, tuple) and json.loads(step[0][0]["content"]) == [], step


def test_its_cpu_time_is_limited(folder):
    started = time.monotonic()
    step, env = step_of(folder, "cpu", timeout=30, cpu_seconds=1)
    assert isinstance(step, Step) and env.metrics["lost"] == 1 and time.monotonic() - started < 15


@pytest.mark.parametrize("does", [*RAW, "nan", "half_a_frame", "slow_bytes", "huge_frame", "exits"])
def test_what_it_sends_costs_its_own_episode_only(does, folder):
    started = time.monotonic()
    step, env = step_of(folder, does, timeout=1.5)
    assert isinstance(step, Step) and not step.messages and not step.done and step.reward == 0
    assert env.metrics == {"lost": 1.0} and time.monotonic() - started < 10


def test_a_frame_of_two_gigabytes_takes_no_memory(folder):
    before = _peak_mb()
    step_of(folder, "huge_frame", timeout=2)
    assert _peak_mb() - before < 100


def test_a_text_that_would_take_gigabytes_as_tokens_costs_its_own_episode(monkeypatch):
    monkeypatch.setitem(limits._raised, "text_mb", 1)
    answer = {**GOOD, "done": False, "messages": [{"role": "user", "content": "x" * 10**6}]}
    assert _read_step(answer)["messages"] == answer["messages"]
    answer["messages"] *= 2
    with pytest.raises(BadAnswer, match="more than 1 million characters"):
        _read_step(answer)


def _peak_mb() -> float:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def test_nothing_lives_after_the_end(folder):
    step_of(folder, "later")
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if _is_boxed(path)]
    assert left == []
    time.sleep(2)
    assert not (folder / "env/late").exists()


def _is_boxed(path: Path) -> bool:
    """Whether a process is in another pid namespace than this one, and not a child of somebody else's sandbox."""
    try:
        return os.readlink(path.parent / "ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def test_a_folder_of_env_paths_is_read_only(folder, tmp_path):
    (tmp_path / "data.txt").write_text("data")
    code = f"""
class Environment:
    def reset(self, task):
        text = open({str(tmp_path / "data.txt")!r}).read()
        try:
            open({str(tmp_path / "data.txt")!r}, "a")
        except OSError as error:
            text += f" {{error.errno}}"
        return [{{"role": "user", "content": text}}]
    def step(self, response):
        return 1.0, True
"""
    (folder / "env/reads.py").write_text(code)
    env = ProcessEnvironment(Source(str(folder / "env/reads.py")), 1024, 20.0, Box(paths=(str(tmp_path),)))
    assert env.reset({}) == [{"role": "user", "content": "data 30"}]
    env.close()
    hidden = ProcessEnvironment(Source(str(folder / "env/reads.py")), 1024, 20.0)
    assert "FileNotFoundError" in hidden.reset({}).found
    hidden.close()


STARTED_IN = """
import os
class Environment:
    def reset(self, task):
        found = [path for path in task["paths"] if os.path.isfile(path) and open(path).read()]
        return [{"role": "user", "content": " ".join(found)}]
    def step(self, response):
        return 1.0, True
"""


def test_the_folder_where_the_trainer_was_started_is_hidden(tmp_path, monkeypatch):
    """The folder of the environment's file is shown, without names that begin with a dot."""
    files = ("env.py", "rows.jsonl", ".env", ".git/config", "envs/env.py", "envs/words.txt", "envs/.env", "envs/.d/key")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(STARTED_IN if name.endswith(".py") else "secret-key")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nursery.Nursery, "_here", None)
    shown = {
        "envs/env.py": "envs/env.py envs/words.txt",
        "env.py": "env.py rows.jsonl envs/env.py envs/words.txt envs/.env envs/.d/key",
        str(tmp_path / "envs/env.py"): "envs/env.py envs/words.txt",
    }
    for source, expected in shown.items():
        env = ProcessEnvironment(Source(source), 1024, 60.0)
        assert env.reset({"paths": files}) == [{"role": "user", "content": expected}]
        env.close()
    box = Box(paths=("rows.jsonl", "envs/.d"))
    env = ProcessEnvironment(Source("envs/env.py"), 1024, 60.0, box)
    assert env.reset({"paths": files})[0]["content"] == "rows.jsonl envs/env.py envs/words.txt envs/.d/key"
    env.close()


def test_the_folder_of_a_reward_is_no_folder_of_an_environment(tmp_path, monkeypatch):
    """A file finds the modules beside it. So its folder is on Python's path, here of this process."""
    for name in ("rewards/reward.py", "rewards/beside_a_reward.py", "envs/env.py", "envs/words.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(STARTED_IN if name.endswith("env.py") else "key = 1")
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr(nursery.Nursery, "_here", None)
    import_code(str(tmp_path / "rewards/reward.py"), "--reward_func")
    assert str(tmp_path / "rewards") in sys.path
    env = ProcessEnvironment(Source(str(tmp_path / "envs/env.py")), 1024, 60.0)
    shown = env.reset({"paths": [str(tmp_path / name) for name in ("rewards/beside_a_reward.py", "envs/words.txt")]})
    env.close()
    assert shown == [{"role": "user", "content": str(tmp_path / "envs/words.txt")}]


def test_a_module_of_the_start_folder_is_shown_without_the_rest(tmp_path, monkeypatch):
    (tmp_path / "games").mkdir()
    for name in ("games/__init__.py", "games/guess.py", "other.py", "rows.jsonl"):
        (tmp_path / name).write_text("raise SystemError('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = sandbox.visible_paths("games.guess", [])
    assert str(tmp_path / "games") in shown and str(tmp_path) not in shown and str(ROOT) not in shown
    assert str(tmp_path) in sandbox.visible_paths("other", [])


def test_root_becomes_a_user_that_the_machine_has():
    assert sandbox.another_user(7, "0 0 4294967295\n") == 2_000_000_007
    assert sandbox.another_user(7, "0 1000 1\n1 100000 65536\n") == 65536 - 7
    with pytest.raises(OSError, match="root has no second user here"):
        sandbox.another_user(7, "0 0 1\n")


HIDDEN_PROC = """
assert sandbox._libc.unshare(0x20000) == 0
sandbox._mount("none", "/", None, sandbox.MS_REC | sandbox.MS_PRIVATE)
sandbox._mount("tmpfs", "/proc/irq", "tmpfs", 0)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="rights that only root can give away")
@pytest.mark.parametrize(
    ("dropped", "before", "expected"),
    [
        ("sys_admin", "", "sound"),
        ("setuid", "", "this machine allows no sandbox: no other user or group (uid_map): Operation not permitted"),
        ("sys_time", HIDDEN_PROC, "this machine allows no sandbox: no new /proc, as in a container that hides parts"),
        (
            "sys_admin",
            "import os; os.chmod(os.path.dirname(file), 0o700)",
            "env.py; it is never root (allowed: ",
        ),
    ],
    ids=("container", "no other user", "no proc", "private"),
)
def test_root_of_a_container_has_a_whole_sandbox_or_one_line(dropped, before, expected, folder):
    code = f"""
from trainer.rollout.envs import sandbox
from trainer.rollout.envs.env_process import check_sandbox
from trainer.rollout.envs.environments import Source
file = {str(folder / "env/env.py")!r}
{before}
try:
    check_sandbox(Source(file), sandbox.Box())
    print("sound")
except Exception as error:
    print(error)
"""
    command = ["setpriv", "--bounding-set", f"-{dropped}", "--inh-caps", f"-{dropped}", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (folder / "env").chmod(0o755)
    assert expected in ended.stdout and ended.stdout.count("\n") == 1, ended


def test_a_machine_without_namespaces_is_refused_in_one_line(folder, monkeypatch):
    """The nursery is another process, so its refusal is made by a module that it imports first."""
    patched = folder / "sitecustomize.py"
    patched.write_text(
        "import ctypes\nreal = ctypes.CDLL\n"
        "def library(*a, **k):\n    found = real(*a, **k)\n    found.unshare = lambda *_: ctypes.set_errno(1) or -1\n"
        "    return found\nctypes.CDLL = library\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(nursery.Nursery, "_here", None)
    with pytest.raises(
        UserError, match=r"--env_sandbox: this machine allows no sandbox: no user, pid, .*not permitted"
    ):
        check_sandbox(Source(str(folder / "env/env.py")), Box())
    patched.unlink()
    monkeypatch.setattr(nursery.Nursery, "_here", None)
    check_sandbox(Source(str(folder / "env/env.py")), Box())


def test_code_that_cannot_be_loaded_is_one_line_and_runs_in_the_sandbox_only(tmp_path):
    (tmp_path / "env.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(UserError, match=r"--env: .*env\.py cannot be imported: OSError"):
        check_sandbox(Source(str(tmp_path / "env.py")), Box())
    assert not (tmp_path / "executed").exists()


AS_USER = """
import json, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {rollout!r}]
import test_sandbox as t
found = {{}}
for does in (*t.REACH, *t.LIMITS):
    step, env = t.step_of(Path({folder!r}), does, processes=64, disk_mb=16)
    found[does] = json.loads(step[0][0]["content"]) if isinstance(step, tuple) else str(step)
print(json.dumps(found))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests are already those of a user")
def test_the_same_as_another_user(folder):
    """By the system's Python, since this one may be in root's home folder."""
    system = "/usr/bin/python3"
    places = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = subprocess.run([system, "-c", "import sys; print(sys.version[:4])"], capture_output=True, text=True)
    if asked.returncode or asked.stdout.strip().rstrip(".") != version or os.stat(ROOT).st_mode & 5 != 5:
        pytest.skip("no Python that another user can run")
    (folder / "private").chmod(0o600)
    code = AS_USER.format(tests=f"{ROOT}/test", rollout=f"{ROOT}/test/rollout", folder=str(folder))
    command = ["setpriv", "--reuid", str(PLAIN_USER), "--regid", str(PLAIN_USER), "--clear-groups", system, "-c", code]
    env = {"PYTHONPATH": os.pathsep.join(places), "PATH": os.environ["PATH"], "HF_TOKEN": "secret-key", "HOME": "/tmp"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd="/")
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == {does: [] for does in (*REACH, *LIMITS)}


def test_the_attacks_work_without_a_sandbox(folder):
    """Else the tests above could not fail. Only what does no harm."""
    code = f"""
import ctypes, json, os, runpy, socket
ctypes.CDLL(None).unshare(0x8000000)  # its queues end with it
attacks = runpy.run_path({str(folder / "env/env.py")!r})["Attacks"]()
print(json.dumps([attacks.network(), attacks.path_socket(), attacks.keys()[:1], attacks.rights() != [],
                  attacks.file_size(), attacks.hidden_memory(), attacks.system() != [], attacks.root() != []]))
os.remove("/tmp/sparse")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"HF_TOKEN": "secret-key"})
    assert json.loads(ended.stdout) == [
        [0], [0, 1], ["HF_TOKEN"], True, [0], [0, 1, 2, 3, 4, 5], *[os.getuid() == 0] * 2
    ], ended.stderr  # fmt: skip
