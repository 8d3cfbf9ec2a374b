"""_clocks: nothing but the wait for the launch before it."""

from tests.compile_check import Case

CASES = (Case("_clocks:_mark", {}, {}, forbid=("globaltimer",)),)
