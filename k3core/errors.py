"""Exceptions on which a caller decides; everything else is ValueError or an assertion."""


class IntegrityError(Exception):
    """Stored bytes are not what they must be. The message names the file, what was expected and what was found."""


class RunError(Exception):
    """Ends a run; nothing is lost. The message is for a person: what happened and which setting answers it."""
