"""What every check here raises."""


class Refusal(ValueError):
    """The run cannot start; the text says what, where and what to do."""
