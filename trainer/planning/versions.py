"""Which versions of the libraries are certified: the cards that `scripts/certify_versions.py` wrote."""

import contextlib
import hashlib
import importlib.metadata
import json
from pathlib import Path

from trainer.metrics import counted

CARDS = Path(__file__).parent / "cards"
LIBRARIES = ("torch", "transformers", "deepspeed")  # a card counts where these are installed in its versions


def version_of(package: str) -> str | None:
    """The installed version of a package. None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(libraries=LIBRARIES) -> dict[str, str]:
    """{library: version, without the build behind a plus sign}, of those that are installed."""
    return {name: found.partition("+")[0] for name in libraries if (found := version_of(name))}


def read_cards(folder: Path = CARDS) -> list[dict]:
    """All cards, the oldest first. A file that is no whole card, by its sha256, is none."""
    cards = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            card = json.loads(path.read_text())
            cards += [card] if isinstance(card, dict) and card.get("sha256") == digest(card) else []
    return sorted(cards, key=lambda card: card["date"])


def digest(card: dict) -> str:
    """The sha256 of a card without its own, over its JSON with sorted keys."""
    content = {key: value for key, value in card.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def card_of(versions: dict[str, str], cards: list[dict]) -> dict | None:
    """The newest card of these versions."""
    return next((c for c in reversed(cards) if versions.items() <= c["versions"].items()), None)


def certified_line(versions: dict[str, str], cards: list[dict]) -> tuple[bool, str]:
    """(whether these versions are certified, one line that says so, with the date or the last certified versions)."""
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    card = card_of(versions, cards)
    if card:
        return card["verdict"] == "certified", f"{named}: {card['verdict']} {card['date']}{_left(card)}"
    good = [card for card in cards if card["verdict"] == "certified"]
    if not good:
        return False, f"{named}: not certified"
    last = ", ".join(f"{name} {good[-1]['versions'][name]}" for name in versions)
    return False, f"{named}: not certified (the last are {last})"


def _left(card: dict) -> str:
    """What a card says of cells that do not pass, for example ", 2 cells refused"."""
    counts = {word: card["zoo"]["verdicts"].get(word, 0) for word in ("refused", "wrong", "crash")}
    return "".join(f", {counted(count, 'cell')} {word}" for word, count in counts.items() if count)
