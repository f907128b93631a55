"""Makes `torchere` a regular package; all else about the distribution is in pyproject.toml.

A namespace package would have no `__version__`, and a folder named `torchere` in the current directory, such
as a clone of the repository, would be imported in its place.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# import-linter reads the four parts of an editable installation as packages of their own, which it does only
# below a package without a location.
_EDITABLE = "\n__spec__.has_location = False  # for import-linter: see setup.py of the checkout\n"


class BuildPackage(build_py):
    """Adds `package/__init__.py` as `torchere/__init__.py`; to an editable installation, as a copy.

    And an empty `py.typed` beside it, without which type checkers see no `torchere.__version__`.
    """

    def run(self) -> None:
        """Copy the modules."""
        super().run()
        top = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        file = Path(top, "torchere", "__init__.py")
        self.mkpath(str(file.parent))
        text = Path("package/__init__.py").read_text(encoding="utf-8")
        file.write_text(text + _EDITABLE * self.editable_mode, encoding="utf-8")
        file.with_name("py.typed").touch()


setup(cmdclass={"build_py": BuildPackage})
