"""Makes the `torchere` of wheels a regular package; all else about the distribution is in pyproject.toml.

An editable installation stays a namespace package: import-linter reads the folders of its four parts as
packages of their own.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPackage(build_py):
    """Adds `package/__init__.py` as `torchere/__init__.py`."""

    def run(self) -> None:
        """Copy the modules."""
        super().run()
        if not self.editable_mode:
            self.copy_file("package/__init__.py", str(Path(self.build_lib, "torchere", "__init__.py")))


setup(cmdclass={"build_py": BuildPackage})
