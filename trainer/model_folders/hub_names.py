"""Ask the hub early for what flags name, in one short request: its libraries ask again and again, seconds apart."""

import os
from typing import Literal

from trainer.errors import UserError, one_line

TIMEOUT_SECONDS = 10  # of one request


def check_on_hub(name: str, flag: str, kind: Literal["model", "dataset"]) -> None:
    """Raise UserError if neither the hub nor the cache has this repository. If the hub is silent, the cache serves alone."""
    # only who names no folder waits for it
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    home = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    places = [os.path.join(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")]
    places += [os.path.join(home, name.replace("/", "___"))] if kind == "dataset" else []
    is_cached = any(map(os.path.isdir, places))
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_SECONDS)
        return
    except HFValidationError as error:
        reason = one_line(error)
    except GatedRepoError:
        reason = "its owner must let you in: ask on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = f"there is no such {kind}, or it is private: set HF_TOKEN"
    except OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set, and the cache does not have it"
    except Exception as error:  # no network, a wrong certificate, a proxy: each has its own type
        reason = f"no answer from {constants.ENDPOINT}: {one_line(error)}"
        if is_cached:
            os.environ["HF_HUB_OFFLINE"] = "1"  # for ranks, and for libraries that are imported later
            constants.HF_HUB_OFFLINE = True
            if int(os.environ.get("RANK", 0)) == 0:
                print(f"{flag} {name}: {reason}. It is taken from the cache", flush=True)
    if not is_cached:
        what = "folder" if kind == "model" else "file or folder"
        raise UserError(flag, f"{name} is not a {what}, and the hub does not give it ({reason})")
