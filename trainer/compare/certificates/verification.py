"""Verify a run against its certificate: which checks run, and a run that is repeated in another layout."""

import json
import os
import tempfile

from trainer.comma_separated import names_in
from trainer.compare.certificates import certificate_checks as checks
from trainer.compare.certificates.plain_replay import TOLERANCES, certify_steps, planned_batches
from trainer.compare.certificates.rights import is_here, refuse_rights
from trainer.compare.runs.many_runs import run_here
from trainer.entry import quiet_libraries
from trainer.errors import UserError, as_line
from trainer.flags.rules import COMMANDS
from trainer.metrics import counted
from trainer.models.model_loading import resolve_model_folder
from trainer.reports import certificate, signature

# a rerun writes elsewhere, from the start, and only what the comparison needs
NOT_RERUN = {
    "output_dir", "overwrite", "save_path", "no_save", "load_checkpoint", "parity_dump", "parity_trace", "certificate",
    "certify", "sign_key", "verify_resume", "report_to", "use_wandb", "use_tensorboard", "save_steps", "save_interval_minutes", "best_metric_key",
    "eval_dataset", "eval_dataset_flags", "eval_steps", "eval_split", "save_hf_ckpt", "async_save", "ckpt_format", "max_ckpt_num",
    "evals_per_epoch", "saves_per_epoch", "max_ckpt_mem", "wandb_project", "run_name", "save_only_model", "push_to_hub",
    "hub_model_id", "hub_private_repo", "hub_dry_run", "dataset_num_proc",
}  # fmt: skip


def verify(
    folder: str,
    dataset: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    key: str | None = None,
) -> dict[str, list[str] | None]:
    """{what was checked: differences}. None instead of differences means that it could not be checked here.

    The certificate grants no right. Without `trust_remote_code` no code of a model folder runs. Nothing is fetched but
    `model` and `dataset`. With `key`, the file of a public key, a certificate without its signature differs.
    """
    content = certificate.read(folder)
    results = {
        "certificate": checks.check_seal(content),
        **({"signature": _result(checks.check_signature, content, key)} if key or "signature" in content else {}),
        "files": _result(checks.check_files, folder, content),
        "steps": _result(checks.check_rows, folder, content),
        "facts": _result(checks.check_facts, folder, content),
    }
    model_folder = _model_folder(content, model)
    results["model"] = _result(checks.check_models, content, model_folder)
    results["data"] = _result(checks.check_data, content, dataset)
    results["order"] = results["schedule"] = None
    if not results["steps"]:
        starts, rows = certificate.final_rows(folder)
        results["order"] = _result(_order, content, rows, model_folder, dataset, trust_remote_code)
        results["schedule"] = _result(checks.check_schedule, content, starts, rows)
    results["saved model"] = _result(checks.check_saved, folder, content)
    results["checkpoints"] = _result(checks.check_checkpoints, folder, content)
    results["replays"] = _result(checks.check_replays, content)
    return results


# what values raise that no run writes
ODD_VALUES = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, MemoryError)


def _result(check, *values) -> list[str] | None:
    """The result of a check. Values of a form that no run writes are a difference too."""
    try:
        return check(*values)
    except ODD_VALUES as error:
        return [f"cannot be compared, a value has another form than a run writes: {shown(error)}"]


def shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _model_folder(content: dict, given: str | None) -> str | None:
    """The folder of the run's model. A hub name is fetched only if it is `given`."""
    certified = content["arguments"].get("pretrain")
    if not given and not (isinstance(certified, str) and os.path.isdir(certified)):
        return None
    try:
        return resolve_model_folder(given or certified)
    except UserError:  # broken, or not on the hub
        return None


def missing_rights(content: dict, places: dict[str, str | None], trust_remote_code: bool) -> list[str]:
    """One line for each right that the run had, and that this command was not given."""
    arguments, lines = content["arguments"], []
    if arguments.get("trust_remote_code") and not trust_remote_code:
        lines += ["--trust_remote_code: the run used code of its model folder; order is checked only with this flag"]
    for name, value in {**places, "lora_adapter": None}.items():
        certified = arguments.get(name)
        there = isinstance(certified, str) and all(map(is_here, names_in(certified)))
        if not value and certified and not there:
            lines += [f"--{name}: {' '.join(str(certified).split())[:80]} is not here, and is not fetched unasked"]
    return lines


def _order(
    content: dict, rows: list[dict], model_folder: str | None, dataset: str | None, trust_remote_code: bool
) -> list[str] | None:
    """None where batches are not rows of --dataset: generated or streamed. None also without the data or tokenizer."""
    arguments = content["arguments"]
    if missing_rights(content, {"dataset": dataset}, trust_remote_code):
        return None
    if (
        arguments.get("streaming")
        or arguments.get("teacher_answers")
        or model_folder is None
        or certificate.has_rollouts(content)
    ):
        return None
    try:
        samples, batch = planned_batches(content, model_folder, dataset, trust_remote_code)
    except UserError as error:
        if any(os.path.exists(os.path.expanduser(name)) for name in content["data"]["files"]) or dataset:
            return [f"the data cannot be read as it was: {error}"]
        return None
    return checks.check_order(content, rows, samples, batch)


def rerun(content: dict, output_dir: str, flags: list[str], given: set[str]) -> list[str]:
    """Train again (all ranks) with the certificate's flags, and `flags` after them. Returns differences (rank 0).

    Raises UserError if a flag of the certificate grants a right that is not `given` by name, here or in `flags`.
    """
    kept = {name: value for name, value in content["arguments"].items() if name not in NOT_RERUN}
    if not kept.get("eval_fraction"):  # else the limit decides which rows are trained
        kept.pop("max_eval_samples", None)
    own = {word.split("=")[0].removeprefix("--") for word in flags if word.startswith("--")}
    if certificate.has_rollouts(content):
        found = f"a run of {content['command']}, whose samples are generated anew"
        raise UserError("--rerun", found, "a run that trains rows of --dataset")
    refuse_rights(COMMANDS[content["command"]], kept, given | own, certificate.FILE)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({name: value for name, value in kept.items() if value is not None}, file)  # JSON is YAML
        file.flush()
        line = ["--config", file.name, *flags, "--output_dir", output_dir, "--no_save"]
        run_here(content["command"], line)
    return _result(compare_curves, content, output_dir) if int(os.environ.get("RANK", 0)) == 0 else []


def compare_curves(content: dict, folder: str) -> list[str]:
    """What differs in the run of `folder`: batches exactly, losses and gradient norms within rounding."""
    starts, rows = certificate.final_rows(folder)
    dtypes = {content["arguments"]["param_dtype"], starts[-1]["config"]["param_dtype"]}
    loss_limit, norm_limit = TOLERANCES["fp32"] if dtypes == {"fp32"} else TOLERANCES["bf16"]
    steps, other = content["steps"], certificate.describe_steps(rows)
    if (steps["first"], steps["last"]) != (other["first"], other["last"]):
        return [f"steps {other['first']} to {other['last']}, not {steps['first']} to {steps['last']}"]
    if steps["batch_chain"] != other["batch_chain"]:
        return ["the chain of batch hashes differs: other data or another order"]
    differences = []
    for key, limit in (("losses", loss_limit), ("grad_norms", norm_limit)):
        for row, certified in zip(rows, steps[key], strict=True):
            value = row["loss" if key == "losses" else "grad_norm"]
            if limit is not None and not abs(value - certified) <= limit * abs(certified):
                differences.append(f"step {row['step']}: {key[:-1]} {value}, the certificate has {certified}")
    worst = max(abs(a / b - 1) for a, b in zip(other["losses"], steps["losses"], strict=True))
    print(f"rerun: {counted(len(rows), 'step')}, same chain of batches, worst loss difference {worst:.2g}", flush=True)
    return differences


def describe(results: dict[str, list[str] | None]) -> str:
    lines = []
    for name, differences in results.items():
        state = "not checked" if differences is None else "FAIL" if differences else "ok"
        lines += [f"{name:<12} {state}", *(f"    {as_line(text)}" for text in differences or [])]
    return "\n".join(lines)


def verify_run(
    folder: str,
    places: dict[str, str | None],
    num_replays: int | None,
    device: str,
    rerun_dir: str | None,
    flags: list[str],
    trust_remote_code: bool = False,
    key: str | None = None,
    sign_key: str | None = None,
) -> bool:
    """Verify a run, and print what differs. Returns whether all that could be checked is as certified.

    `places` says where the data and the model of the run (keys "dataset" and "pretrain") are on this machine. Up to
    `num_replays` steps are replayed on `device`. With `rerun_dir`, all ranks train again in that folder, with the flags
    of the run and then `flags`. Ranks above 0 then return True. Code of a model folder runs only with
    `trust_remote_code`. `key` is the file of the public key that must have signed. `sign_key` signs a certificate that
    a replay changes.
    """
    quiet_libraries()
    content = certificate.read(folder)
    flag = "--rerun" if rerun_dir else "--certify" if num_replays else None
    if flag and (broken := checks.check_seal(content)):  # a replay would seal an edited certificate
        raise UserError(flag, broken[0], "the certificate as it was written")
    if flag and key and (unsigned := checks.check_signature(content, key)):
        raise UserError("--key", unsigned[0], "a certificate that this key signed")
    if sign_key:
        _refuse_to_sign(content, sign_key, key)
    replaced = {**content, "arguments": content["arguments"] | {k: v for k, v in places.items() if v}}
    given = {name for name, value in {**places, "trust_remote_code": trust_remote_code}.items() if value}
    results = {"rerun": rerun(replaced, rerun_dir, flags, given)} if rerun_dir else {}
    if int(os.environ.get("RANK", 0)):
        return True
    if num_replays:
        if missing := missing_rights(content, places, trust_remote_code):
            raise UserError("--certify", missing[0], "the flag, if you trust it")
        model_folder = _model_folder(content, places["pretrain"])
        if model_folder is None:
            raise UserError("--pretrain", f"{content['arguments']['pretrain']} is not here", "the model of the run")
        if sign_key:
            found = verify(folder, places["dataset"], places["pretrain"], trust_remote_code, key)
            if failed := [name for name, differences in found.items() if differences]:
                raise UserError("--sign_key", f"{folder} is not as certified: {', '.join(failed)}", "a run that passes")
        replayed = (num_replays, device, model_folder, places["dataset"], trust_remote_code, sign_key)
        try:
            print(certify_steps(folder, *replayed))
        except ODD_VALUES as error:
            raise UserError(
                "--certify", f"{folder} cannot be replayed: {shown(error)}", "a run as it was written"
            ) from None
    results = verify(folder, places["dataset"], places["pretrain"], trust_remote_code, key) | results
    print(describe(results))
    for line in missing_rights(content, places, trust_remote_code):
        print(f"not granted  {as_line(line)}")
    failed = [name for name, differences in results.items() if differences]
    print(f"FAIL {folder}: {', '.join(failed)}" if failed else f"PASS {folder}", flush=True)
    return not failed


def _refuse_to_sign(content: dict, sign_key: str, key: str | None) -> None:
    """Raises UserError, before any replay, for a file that is no private key and for a signature that nobody checks."""
    signature.private_key(sign_key)
    if "signature" in content and not key:
        found = f"{certificate.FILE} is signed, and nothing has checked its signature"
        raise UserError("--sign_key", found, "--key with the public key, too")
