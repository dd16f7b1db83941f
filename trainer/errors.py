"""UserError, the error that users see: one line that says where, what was found and what to do."""


class UserError(Exception):
    """Something is wrong with the arguments, the data, the layout or a checkpoint.

    `where` is the flag or the file (and line). `found` is what was found there. `allowed` is what would be accepted.
    `instead` is a sentence that says what to do, in place of `allowed`.
    """

    def __init__(self, where: str, found: str, allowed: str = "", instead: str = ""):
        super().__init__(where, found, allowed, instead)  # all go into args, so that the error survives pickling
        self.where, self.found, self.allowed, self.instead = where, found, allowed, instead

    def __str__(self) -> str:
        if self.instead:
            return f"{self.where}: {self.found}. {self.instead}"
        return f"{self.where}: {self.found}" + (f" (allowed: {self.allowed})" if self.allowed else "")


def one_line(error: BaseException) -> str:
    """The first line of an error that says something, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(":") if lines else type(error).__name__


class Interrupted(Exception):
    """A signal asked the run to stop. The message says whether the run could save a checkpoint first."""
