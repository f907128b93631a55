"""Adds `torchere_ts.pth` to the wheel: Python runs it at each start, which makes the names importable."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """Copies the `.pth` file beside the package, for which setuptools has no option."""

    def run(self) -> None:
        """Build, and copy the file."""
        super().run()
        self.copy_file("torchere_ts.pth", str(Path(self.build_lib) / "torchere_ts.pth"))


setup(cmdclass={"build_py": BuildWithPth})
