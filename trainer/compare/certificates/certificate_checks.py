"""The checks of `verify_run`: each compares one part of a certificate with the files, and names what differs.

A check returns the differences as texts. An empty list means that all is as certified. None means that the check could
not look, for example because the data is not on this machine.
"""

import json
import os
from itertools import islice
from typing import Any

import torch
import yaml

from trainer.checkpoints import checkpoint_store as store
from trainer.comma_separated import names_in
from trainer.datasets.batches.global_batches import column_of, hash_digests
from trainer.errors import UserError
from trainer.limits import read_text
from trainer.metrics import counted
from trainer.optimizers.build import build_scheduler
from trainer.reports import certificate, signature
from trainer.runs.flag_checks import models_of

SHOWN = 5  # differences of one kind that are listed
SCHEDULE_FLAGS = ("learning_rate", "lr_scheduler", "lr_warmup_ratio", "warmup_steps", "min_lr_ratio")


class _Plain(yaml.SafeLoader):
    """Without aliases, of which a few lines can stand for billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def check_seal(content: dict) -> list[str]:
    if certificate.own_hash(content) == content.get("blake2b"):
        return []
    return [f"{certificate.FILE} was edited: it does not have its own hash"]


def check_signature(content: dict, key_file: str | None) -> list[str] | None:
    """The signature by the key of a file. None without a key."""
    if key_file is None:
        return None
    return signature.differences(certificate.own_hash(content), content.get("signature"), key_file)


def check_files(folder: str, content: dict) -> list[str]:
    """Size and hash of metrics.jsonl, config.yaml and rollouts.jsonl."""
    there = [name for name in certificate.RUN_FILES if os.path.exists(os.path.join(folder, name))]
    extra = [name for name in there if name not in content["files"]]
    return _different_files(folder, content["files"]) + [f"{name} is not in the certificate" for name in extra]


def check_rows(folder: str, content: dict) -> list[str]:
    """The step rows: their chains, and the first rows that differ."""
    try:
        _, rows = certificate.final_rows(folder)
    except UserError as error:
        return [str(error)]
    steps, found = content["steps"], certificate.describe_steps(rows)
    numbers = [row["step"] for row in rows]
    there = set(numbers)
    absent = (step for step in range(steps["first"], steps["last"] + 1) if step not in there)
    if missing := list(islice(absent, SHOWN + 1)):
        return [f"metrics.jsonl has no step {_listed(missing)}"]
    if numbers != list(range(steps["first"], steps["last"] + 1)):
        return [f"metrics.jsonl has steps up to {numbers[-1]}, the certificate up to {steps['last']}"]
    differences = []
    for key, name in (("losses", "loss"), ("grad_norms", "grad_norm"), ("batch_hashes", "batch_hash")):
        for step, mine, certified in zip(numbers, found[key], steps[key], strict=True):
            if not _same(mine, certified):
                differences.append(f"step {step}: {name} is {mine}, the certificate has {certified}")
    if not differences and (found["row_chain"], found["batch_chain"]) != (steps["row_chain"], steps["batch_chain"]):
        differences.append("the chain over the rows differs: the lr, the epoch or the number of tokens was edited")
    return differences[:SHOWN]


def check_facts(folder: str, content: dict) -> list[str]:
    """Configuration, versions, mesh and data facts: the start row and config.yaml against the certificate."""
    try:
        facts = certificate.final_rows(folder)[0][-1]
    except UserError as error:
        return [str(error)]
    pairs = {"arguments": facts["config"], "versions": facts["versions"], "mesh": facts["mesh"]}
    differences = []
    for part, mine in pairs.items():
        differences += _different_values(f"metrics.jsonl: {part}", mine, content[part])
    differences += _different_values("metrics.jsonl: data", facts["data"], content["data"]["ledger"])
    if facts["total_steps"] != content["total_steps"]:
        differences.append(f"metrics.jsonl: total_steps is {facts['total_steps']}, not {content['total_steps']}")
    path = os.path.join(folder, "config.yaml")
    if os.path.exists(path) and not content["resumed_after_steps"]:  # a resume may have other flags
        try:
            flags = yaml.load(read_text(path), _Plain)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
            flags = None
        if not isinstance(flags, dict):
            return [*differences, "config.yaml holds no flags and values"]
        differences += _different_values("config.yaml", flags, content["arguments"])
    return differences


def check_models(content: dict, model_folder: str | None) -> list[str] | None:
    """The files of the model that the run started from. `model_folder` replaces --pretrain."""
    differences, looked, named = [], False, models_of(content["arguments"]) | {"pretrain": model_folder}
    for flag, files in content["models"].items():
        given = named[flag]
        if given and os.path.isdir(given):
            looked = True
            differences += _different_files(given, files)
    return differences if looked else None


def check_data(content: dict, replaced: str | None) -> list[str] | None:
    """The data files. `replaced` is a comma-separated list of other places for the files of --dataset."""
    arguments = dict(content["arguments"])
    others = dict(zip(names_in(arguments["dataset"]), names_in(replaced), strict=False))
    differences, looked = [], False
    for name, files in content["data"]["files"].items():
        path = os.path.expanduser(others.get(name, name))
        if os.path.exists(path):
            looked = True
            differences += _different_files(path, files)
    return differences if looked else None


def check_order(content: dict, rows: list[dict], samples: Any, batch: Any) -> list[str]:
    """The batches, computed again from the data, the seed and the sizes. Hash and targets must equal the row's."""
    digests, targets = column_of(samples, "digest"), column_of(samples, "num_loss_tokens")
    is_same = hash_digests(digests) == content["data"]["data"]
    differences = [] if is_same else ["the tokens of the data are not the tokens of the run"]
    hashes = []
    for row in rows:
        ids = batch(row["step"])
        hashes.append(hash_digests(digests[ids]))
        if hashes[-1] != row["batch_hash"]:
            differences.append(f"step {row['step']}: the data, seed and sizes give another batch")
        elif int(targets[ids].sum()) != row["tokens"]:
            differences.append(f"step {row['step']}: {counted(int(targets[ids].sum()), 'target')}, not {row['tokens']}")
    if not differences and certificate.chain(hashes) != content["steps"]["batch_chain"]:
        differences.append("the chain of batch hashes differs")
    return differences[:SHOWN]


def check_schedule(content: dict, starts: list[dict], rows: list[dict]) -> list[str] | None:
    """The learning rate of each step, computed again from the flags."""
    arguments = content["arguments"]
    changed = any(start["config"].get(name) != arguments.get(name) for start in starts for name in SCHEDULE_FLAGS)
    if changed or any(row.get("skipped") for row in rows) or certificate.has_rollouts(content):
        return None
    rate = arguments["learning_rate"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    options = {"warmup_ratio": arguments["lr_warmup_ratio"], "min_lr_ratio": arguments["min_lr_ratio"]}
    options["warmup_steps"], total = arguments.get("warmup_steps"), content["total_steps"]
    schedule = build_scheduler(arguments["lr_scheduler"], optimizer, total_steps=total, **options).lr_lambdas[0]
    wrong = [row for row in rows if abs(row["lr"] - rate * schedule(row["step"] - 1)) > 1e-9 * rate]
    return [
        f"step {row['step']}: lr is {row['lr']}, the flags give {rate * schedule(row['step'] - 1)}" for row in wrong
    ]


def check_saved(folder: str, content: dict) -> list[str] | None:
    """The trained model, as the run saved it."""
    differences, looked = [], False
    for name, files in content["saved_models"].items():
        path = os.path.join(folder, name)  # an absolute name stays as it is
        if ".." in name.split("/"):
            looked = True
            differences.append(f"the certificate names {name!r}, which leaves the run folder")
        elif os.path.isdir(path):
            looked = True
            differences += _different_files(path, files)
            extra = [file for file in certificate.list_files(path) if file not in files]
            differences += [f"{os.path.join(path, file)} is not in the certificate" for file in extra]
        elif not os.path.isabs(name):
            looked = True
            differences.append(f"{name} is not there")
    return differences if looked else None


def check_checkpoints(folder: str, content: dict) -> list[str] | None:
    """Each checkpoint has its own hashes, and is the one that was there at the end of the run."""
    root = os.path.join(folder, "checkpoints")
    there = {os.path.basename(path): path for path in store.list_checkpoints(root)}
    differences = [
        f"checkpoints/{name} is not in the certificate" for name in there if name not in content["checkpoints"]
    ]
    for name, certified in content["checkpoints"].items():
        if name not in there:
            continue  # somebody made room
        if damage := store.find_damage(there[name]):
            differences.append(f"checkpoints/{name}: {damage}")
        elif store.hash_file(os.path.join(there[name], store.MANIFEST))["blake2b"] != certified:
            differences.append(f"checkpoints/{name} is another checkpoint than the one of this run")
    return differences if there else None


def check_replays(content: dict) -> list[str] | None:
    """The steps that the plain loop replayed."""
    if "replays" not in content:
        return None
    wrong = [replay for replay in content["replays"] if not replay["within_tolerance"]]
    return [f"step {r['step']}: the plain loop has loss {r['loss']}, {r['relative_loss']:.2g} away" for r in wrong]


def _different_files(folder: str, certified: dict[str, dict]) -> list[str]:
    """What differs from {name: {"size", "blake2b"}}. The name "" is `folder` itself, a file."""
    differences = []
    for name, entry in certified.items():
        path = os.path.join(folder, name) if name else folder
        if name != os.path.basename(name) or name in (".", ".."):
            differences.append(f"the certificate names {name!r}, which is no file directly in {folder}")
        elif not os.path.isfile(path):
            differences.append(f"{path} is not there")
        elif os.path.getsize(path) != entry["size"]:
            differences.append(f"{path} has {counted(os.path.getsize(path), 'byte')} instead of {entry['size']}")
        elif store.hash_file(path) != entry:
            differences.append(f"{path} does not have the bytes that were certified")
    return differences


def _different_values(where: str, mine: dict, certified: dict) -> list[str]:
    names = dict.fromkeys([*certified, *mine])
    wrong = [name for name in names if not _same(mine.get(name), certified.get(name))]
    return [f"{where}: {name} is {mine.get(name)}, the certificate has {certified.get(name)}" for name in wrong]


def _same(mine: Any, certified: Any) -> bool:
    return json.dumps(mine) == json.dumps(certified)  # NaN equals NaN here


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + ", ..." * (len(numbers) > SHOWN)
