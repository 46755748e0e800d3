"""What a replay cannot tell."""


class CannotTellError(Exception):
    """A graph lacks what it takes to say what a run would be without a cause; the message says what is lacking."""
