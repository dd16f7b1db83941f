"""Names that a flag holds with commas between them."""


def names_in(text: str | None) -> list[str]:
    """The names in a text such as "a, b", in order, without the spaces around them. Empty ones do not count; None has none."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def names_to_check(text: str | None) -> list[str]:
    """`names_in`, where a text without any name has one empty name: no check of names lets that one through."""
    return [] if text is None else names_in(text) or [""]
