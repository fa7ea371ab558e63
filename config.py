class UserError(ValueError):
    """A mistake of the person at the terminal; its text is the whole message (what, where, the mend)."""
