"""Classes of a user's, which options name as ``module:Class``."""


def why_not_loaded(error: Exception) -> str:
    """What ``error`` says, which such a module's import or its class has raised; and where modules
    are looked for, if it was not found."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error} (PYTHONPATH must name the folder of your own)"
    return str(error)
