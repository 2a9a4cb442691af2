"""The one error of this package: work refused, with what, where and what to do."""


class PatchRefusal(Exception):
    """Raised when going on would guess. `isoexec patches` prints it and exits with 2."""

    def __init__(self, *, what: str, where: str, mend: str) -> None:
        super().__init__(what, where, mend)
        self.what = what
        """The fact that stops the work, with both values where two things differ."""
        self.where = where
        """The file, folder or distribution it was found in."""
        self.mend = mend
        """What the reader can do about it."""

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  mend:  {self.mend}"
