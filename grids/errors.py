"""The one error that users are meant to read."""


class UserError(Exception):
    """Something a user can mend: its message is one line that names the file, the field and the mend.

    The command line prints the message alone on stderr and exits with code 2; a traceback is shown only with ``--debug``.
    """
