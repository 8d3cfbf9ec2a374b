"""What the emulator raises: every message names the instruction at fault."""


class EmulationError(Exception):
    """The kernel did what PTX leaves undefined, or what this emulator does not know."""


class UnsupportedInstruction(EmulationError):
    """An instruction, modifier or operand form that nothing here executes."""


class Deadlock(EmulationError):
    """Every warp waits and no asynchronous work is left that could wake one."""
