"""How this Python runs a module of ours in another process."""

from __future__ import annotations

import sys

# `-m` puts the working folder first on the path: what lies there, say a `queue.py` beside a
# model, would be run. Python 3.11 has a switch against it; before that the entry is taken out.
_SAFE_RUN = (
    "import sys; del sys.path[0]; import runpy; "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs `module` as `__main__`, with nothing imported from the working folder.

    Secrets go through the environment: everybody on the machine may read a command.
    """
    if sys.version_info >= (3, 11):
        return (sys.executable, "-P", "-m", module, *arguments)
    return command_without_switch(module, *arguments)


def command_without_switch(module: str, *arguments: str) -> tuple[str, ...]:
    """The same for a Python that has no `-P`."""
    return (sys.executable, "-c", _SAFE_RUN.format(module=module), *arguments)
