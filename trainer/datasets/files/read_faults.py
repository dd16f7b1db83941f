"""Why a data file could not be read. This is used only after a reader has failed."""

from trainer.datasets.files.csv_files import find_csv_fault
from trainer.datasets.files.json_faults import find_json_fault
from trainer.datasets.rows import one_line
from trainer.errors import UserError


def explain(error: Exception, kind: str, names: list[str], where: str) -> UserError:
    """Return what the user is told: the file and the line of the fault, if they can be found."""
    find_fault = {"json": find_json_fault, "csv": find_csv_fault}.get(kind)
    for name in names if find_fault else []:
        fault = find_fault(name)
        if fault:
            return _fault_error(where, name, *fault)
    causes = f"{one_line(error)} {one_line(error.__cause__)}"
    if "corresponds to no data" in causes or "No columns to parse" in causes:
        return UserError(where, "no rows")
    return UserError(where, f"cannot be read: {one_line(error.__cause__ or error)}")


def _fault_error(where: str, name: str, place: str, found: str) -> UserError:
    return UserError(f"{where} {place}" if where.endswith(name) else f"{where} {name} {place}", found)
