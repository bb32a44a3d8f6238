"""The files of examples/, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    """Anew each time, so that no test sees what another changed."""
    if str(EXAMPLES) not in sys.path:  # where `python examples/NAME.py` finds what examples share
        sys.path.append(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
