"""`--push_to_hub`: the saved model goes to the Hugging Face Hub. The run makes the repository before it trains."""

import os

from huggingface_hub import HfApi

from trainer.distributed import heartbeat
from trainer.distributed.collectives import from_rank_0
from trainer.errors import UserError, one_line
from trainer.runs.feature import Feature

AVERAGE = "ema"  # the folder in the repository for the average of --ema_beta


def make_repository(run) -> None:
    """Make the repository, unless it is there. This shows that the token may write. Raises UserError."""
    if not run.flags.hub_dry_run:
        from_rank_0(lambda: create(HfApi(), name_of(run.flags), run.flags.hub_private_repo))


def name_of(flags) -> str:
    """--hub_model_id, or the name of --output_dir, as HF Trainer takes it."""
    return flags.hub_model_id or os.path.basename(os.path.realpath(flags.output_dir))


def create(api: HfApi, name: str, private: bool) -> str:
    """Make a repository, unless it is there. Returns its whole name, OWNER/NAME. Raises UserError."""
    try:
        return api.create_repo(name, private=private or None, exist_ok=True).repo_id
    except Exception as error:  # of any type: of the network, of the token, of the name
        cure = "Give a token that may write (hf auth login, or HF_TOKEN), or leave the flag out."
        raise UserError("--push_to_hub", f"{name}: {one_line(error)}", instead=cure) from None


def push(run) -> None:
    """Upload the folders of the saved models (rank 0). Raises UserError if that fails: the folders stay."""
    heartbeat.stop()  # an upload makes no forward pass
    if run.setup.strategy.is_rank_0():
        folders = dict(zip((None, AVERAGE), run.saved_models(run.output_dir)))
        upload(folders, name_of(run.flags), run.flags.hub_private_repo, run.flags.hub_dry_run, run.method.command)


def upload(folders: dict[str | None, str], name: str, private: bool, dry_run: bool, command: str) -> None:
    """Upload `folders`, by their places in the repository `name`. With `dry_run`, only say what would be uploaded."""
    for place, folder in folders.items():
        if dry_run:
            files = {file: os.path.getsize(os.path.join(folder, file)) for file in sorted(os.listdir(folder))}
            listed = ", ".join(f"{file} ({size:,} bytes)" for file, size in files.items())
            print(f"--hub_dry_run: would upload to {'/'.join(filter(None, (name, place)))}: {listed}", flush=True)
            continue
        api = HfApi()
        try:
            repository = create(api, name, private)
            message = f"Model of {command}"
            api.upload_folder(repo_id=repository, folder_path=folder, path_in_repo=place, commit_message=message)
        except Exception as error:  # of any type, as above
            found = f"{one_line(error)}. The model is in {folder}"
            again = " ".join(filter(None, ("hf upload", name, folder, place)))
            raise UserError("--push_to_hub", found, instead=f"{again} tries again.") from None
        print(f"model pushed to {repository}", flush=True)


HUB = Feature("hub", lambda run: run.flags.push_to_hub, before_data=make_repository, at_end=push)
