"""What pyproject.toml has no word for: a .pth file at the top of site-packages, in wheels and in editable installs."""

from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

NAME, LINE = "nemo_fp8_hook.pth", "import nemo_fp8_hook; nemo_fp8_hook.register()\n"


class BuildPth(Command):
    """A step of ``build``. A wheel takes what lies in ``build_lib``; an editable install leaves that out, and takes
    ``install_lib``."""

    editable_mode = False  # set by setuptools

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self):
        Path(self._folder(), NAME).write_text(LINE)

    def get_outputs(self):
        return [] if self.editable_mode else [str(Path(self.build_lib, NAME))]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []

    def _folder(self):
        return self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib


build.sub_commands = [*build.sub_commands, ("build_pth", None)]
setup(cmdclass={"build_pth": BuildPth})
