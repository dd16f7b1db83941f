"""The one error type that people see: one line that says where, what was found and what is allowed."""


class UserError(Exception):
    """Something wrong with the arguments, the data, the layout or a checkpoint.

    `where` names the flag or file (and line), `found` what was found there, `allowed` what would be accepted.
    """

    def __init__(self, where: str, found: str, allowed: str = ""):
        super().__init__(where, found, allowed)  # all three in args: the error must survive pickling
        self.where, self.found, self.allowed = where, found, allowed

    def __str__(self) -> str:
        return f"{self.where}: {self.found}" + (f" (allowed: {self.allowed})" if self.allowed else "")


class Interrupted(Exception):
    """The run was asked by a signal to stop; the message says whether it could save a checkpoint first."""
