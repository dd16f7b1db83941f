"""Names that a flag holds with commas between them."""

from trainer.errors import UserError


def names_in(text: str | None) -> list[str]:
    """The names in a text such as "a, b", in order, without the spaces around them. Empty ones do not count; None has none."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def names_to_check(text: str | None) -> list[str]:
    """`names_in`, where a text without any name has one empty name: no check of names lets that one through."""
    return [] if text is None else names_in(text) or [""]


def addresses_in(text: str | None) -> list[str]:
    """The names in a text that are addresses of servers."""
    return [name for name in names_in(text) if name.startswith(("http://", "https://"))]


def named_in(text: str | None, flag: str, form: str) -> dict[str, str]:
    """{NAME: value} of "NAME=value, NAME=value". Raises UserError for another text; `form` is what `flag` allows."""
    pairs = [part.partition("=") for part in names_in(text)]
    found = {name: value for name, mark, value in pairs if mark and name and value}
    if not found or len(found) < len(pairs):
        raise UserError(flag, text or "", form)
    return found


def models_in(text: str | None, key: str | None) -> list[str]:
    """The models of --teacher: MODEL, MODEL, or with --teacher_key NAME=MODEL, NAME=MODEL."""
    return [part.partition("=")[2] if key else part for part in names_in(text)]


def named_models(flag: str, value: str | None, key: str | None = None) -> dict[str, str]:
    """{flag, with a number from 2 on: model} of each model that is named in the comma-separated value of a flag.

    With a `key`, as --teacher_key, the value has the form NAME=MODEL. Then the flag has NAME behind it.
    """
    if key:
        return {
            f"{flag} {part.partition('=')[0]}": model for part, model in zip(names_in(value), models_in(value, key))
        }
    return {flag + f" {number + 1}" * bool(number): name for number, name in enumerate(names_in(value))}
