"""The task of scripts/demo_real.sh: read an order in English, and answer with its fields as JSON.

python scripts/orders_task.py FOLDER writes orders to train on and to test on. No order is in two files.
`reward_func` scores answers: the share of the fields that are right.
"""

import json
import random
import sys
from pathlib import Path

NUM_ROWS = {"train": 640, "prompts": 256, "test": 64}
NAMES = "Anna Berg,Tom Okafor,Maria Silva,Jun Tanaka,Leila Haddad,Paul Novak,Ruth Cohen,Omar Aziz,Ines Costa,Sven Dahl"
CITIES = "Oslo,Lagos,Porto,Kyoto,Cairo,Prague,Haifa,Madrid,Leeds,Gdansk,Turin,Lima"
ITEMS = "blue pens,staplers,desk lamps,notebooks,paper clips,green folders,envelopes,office chairs,erasers,markers"
MONTHS = "January,February,March,April,May,June,July,August,September,October,November,December"
TEXTS = (
    "Please send {count} {item} to {name} in {city} by {date}.",
    "Hello, {name} here. I need {count} {item}, delivered to {city} no later than {date}. Thanks!",
    "Order for {city}: {count} {item}. Deadline {date}, to the attention of {name}.",
    "Could you ship {count} {item} to our office in {city}? {name} must have them by {date}.",
    "By {date} we want {count} {item} in {city}. Ask for {name}.",
)
FIELDS = ("name", "city", "item", "count", "date")
REQUEST = "Write this order as JSON with the keys name, city, item, count and date.\n\n"


def order(rng: random.Random) -> dict:
    """One order: the chat `messages`, and the JSON of its fields as `label`."""
    name, city, item, month = (rng.choice(names.split(",")) for names in (NAMES, CITIES, ITEMS, MONTHS))
    fields = dict(zip(FIELDS, (name, city, item, rng.randint(2, 99), f"{rng.randint(1, 28)} {month}"), strict=True))
    text = REQUEST + rng.choice(TEXTS).format(**fields)
    return {"messages": [{"role": "user", "content": text}], "label": json.dumps(fields)}


def reward_func(prompts, responses, labels):
    """The share of the fields that an answer has right. 0 for an answer that is no JSON object."""
    return [score(response, json.loads(label)) for response, label in zip(responses, labels, strict=True)]


def score(response: str, wanted: dict) -> float:
    try:
        found = json.loads(response)
    except ValueError:
        return 0.0
    if not isinstance(found, dict) or found.keys() - wanted.keys():
        return 0.0
    return sum(found.get(key) == value for key, value in wanted.items()) / len(wanted)


if __name__ == "__main__":
    folder, rng = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    orders = {row["label"]: row for row in (order(rng) for _ in range(2 * sum(NUM_ROWS.values())))}
    rows = iter(orders.values())
    for name, count in NUM_ROWS.items():
        lines = []
        for _ in range(count):
            row = next(rows)
            if name == "train":
                row["messages"].append({"role": "assistant", "content": row.pop("label")})
            lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
