"""Write `certificate.json` at the end of a run: what went in, what each step did and what came out.

Hashing the weights takes 1.4 s of CPU per GiB, for the model that the run read and for the one that it saved. That can be
more than 1 % of a short run, so only --certificate writes it.
"""

import os

from trainer.distributed.collectives import from_rank_0
from trainer.reports import certificate, signature
from trainer.runs.feature import Feature
from trainer.runs.flag_checks import models_of


def certify_run(
    saved: list[str], folder: str, command: str, model_folder: str, fingerprint: dict, device, sign_key: str | None
) -> None:
    """Write the certificate of the finished run in `folder`. Only rank 0 calls it.

    `saved` are the folders of the trained models, and `model_folder` is that of --pretrain. `fingerprint` is that of
    the loader or of the prompts. `device` is a torch.device. `sign_key` is the file of a key, or None.
    """
    starts, rows = certificate.final_rows(folder)
    facts = starts[-1]
    models = models_of(facts["config"]) | {"pretrain": model_folder}
    saved = [path for path in saved if os.path.isdir(path)]
    content = {
        "format": certificate.FORMAT,
        "command": command,
        "arguments": facts["config"],
        "mesh": facts["mesh"],
        "versions": facts["versions"],
        "hardware": certificate.hardware(str(device)),
        "total_steps": facts["total_steps"],
        "resumed_after_steps": [start["step"] for start in starts if start["event"] == "resume"],
        "models": hash_models(models),
        "data": {"ledger": facts["data"], **fingerprint, "files": certificate.hash_data(facts["config"])},
        "steps": certificate.describe_steps(rows),
        "files": certificate.hash_run_files(folder),
        "saved_models": {certificate.shown_path(path, folder): certificate.hash_path(path) for path in saved},
        "checkpoints": certificate.hash_checkpoints(folder),
    }
    certificate.write(folder, content, sign_key)
    print(f"certificate written to {os.path.join(folder, certificate.FILE)}", flush=True)


def hash_models(models: dict[str, str]) -> dict[str, dict]:
    """{flag: {file: hash}} of the models in local folders. A teacher is also --ref_model: each folder is read once."""
    places = {flag: os.path.realpath(name) for flag, name in models.items() if name and os.path.isdir(name)}
    hashes = {place: certificate.hash_path(place) for place in dict.fromkeys(places.values())}
    return {flag: hashes[place] for flag, place in places.items()}


def check_key(run) -> None:
    """Read the key before the run trains (rank 0). Raises UserError on all ranks."""
    if run.flags.sign_key:
        from_rank_0(lambda: bool(signature.private_key(run.flags.sign_key)))


def certify(run) -> None:
    """Write the certificate of a finished run (rank 0)."""
    if run.setup.strategy.is_rank_0():
        facts = (
            run.method.command,
            run.setup.folder,
            run.loader.fingerprint(),
            run.setup.strategy.device,
            run.flags.sign_key,
        )
        certify_run(run.saved_models(run.output_dir), run.output_dir, *facts)


CERTIFICATE = Feature(
    "certificate", lambda run: run.flags.certificate or run.flags.certify, before_data=check_key, at_end=certify
)
