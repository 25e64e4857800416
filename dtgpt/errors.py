"""The one exception that is meant for the user's eyes."""


class UserError(Exception):
    """Bad input: one sentence that names the value, the rule and the remedy. Shown without a traceback, exit code 2."""
