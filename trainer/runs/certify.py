"""Write `certificate.json` at the end of a run: what went in, what each step did and what came out.

Hashing the weights takes 1.4 s of CPU per GiB, for the model that the run read and for the one that it saved. That can be
more than 1 % of a short run, so only --certificate writes it.
"""

import os

from trainer.reports import certificate
from trainer.runs.outputs import saved_models

MODEL_FLAGS = ("pretrain", "ref_model", "reward_pretrain", "critic_pretrain", "teacher")


def certify_run(args, folder: str, command: str, model_folder: str, fingerprint: dict, device) -> None:
    """Write the certificate of the finished run in `folder`. Only rank 0 calls it.

    `model_folder` is the folder of --pretrain. `fingerprint` is that of the loader or of the prompts. `device` is a
    torch.device.
    """
    starts, rows = certificate.final_rows(folder)
    facts = starts[-1]
    models = {flag: facts["config"].get(flag) for flag in MODEL_FLAGS} | {"pretrain": model_folder}
    saved = [path for path in saved_models(args, folder) if os.path.isdir(path)]
    content = {
        "format": certificate.FORMAT,
        "command": command,
        "arguments": facts["config"],
        "mesh": facts["mesh"],
        "versions": facts["versions"],
        "hardware": certificate.hardware(str(device)),
        "total_steps": facts["total_steps"],
        "resumed_after_steps": [start["step"] for start in starts if start["event"] == "resume"],
        "models": {flag: certificate.hash_path(name) for flag, name in models.items() if name and os.path.isdir(name)},
        "data": {"ledger": facts["data"], **fingerprint, "files": certificate.hash_data(facts["config"])},
        "steps": certificate.describe_steps(rows),
        "files": certificate.hash_run_files(folder),
        "saved_models": {certificate.shown_path(path, folder): certificate.hash_path(path) for path in saved},
        "checkpoints": certificate.hash_checkpoints(folder),
    }
    certificate.write(folder, content)
    print(f"certificate written to {os.path.join(folder, certificate.FILE)}", flush=True)
