"""`python .ci/ops_page.py > docs/ops.md`: the reference of the public ops, from their signatures and docstrings.

Prints the page; a test holds the one in docs/ to it.
"""

import inspect
import re
import sys
from types import FunctionType

import fastppo

KERNEL_PAGES = {"logprob", "linear_logprob", "linear_ppo_loss", "ppo_loss", "value_loss", "gae"}
# In the order in which a training step calls them.
ORDER = (
    *("logprob", "linear_logprob", "gae", "whiten", "rloo", "group_advantages", "kl_divergence", "ppo_loss"),
    *("value_loss", "linear_ppo_loss", "linear_loss", "summarize", "VocabShard"),
)
HEAD = """# Ops

Every public op with its arguments, as `help(fastppo.<op>)` prints them; this page is made from that by
`python .ci/ops_page.py > docs/ops.md`. [README](../README.md#what-runs-where) says which backend each takes where,
[metrics.md](metrics.md) defines what `metrics` counts, [troubleshooting.md](troubleshooting.md#ops) has errors with
their cures, and [migrate.md](migrate.md) other libraries' names.
"""


def page() -> str:
    functions = {name for name in fastppo.__all__ if isinstance(getattr(fastppo, name), FunctionType)}
    assert functions | {"VocabShard"} == set(ORDER), functions ^ set(ORDER)
    links = " · ".join(f"[{name}](#{name.lower()})" for name in ORDER)
    return "\n".join([HEAD, links, *(section(name) for name in ORDER)]) + "\n"


def section(name: str) -> str:
    op = getattr(fastppo, name)
    text = inspect.getdoc(op)
    if name == "ppo_loss":  # which refers to them
        text += "\n\nThe losses, from the module:\n\n" + inspect.getdoc(inspect.getmodule(op)).partition("\n\n")[2]
    lines = [f"\n## {name}", "", "```python", signature(name, op), "```", "", "```text", text, "```"]
    if name in KERNEL_PAGES:
        lines += ["", f"How it is computed, and how fast: [{name}](kernels/{name}.md)."]
    return "\n".join(lines)


def signature(name: str, op: object) -> str:
    taken = inspect.signature(op)
    arguments, starred = [], False
    for parameter in taken.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            arguments.append("*")
            starred = True
        hint = "" if parameter.annotation is parameter.empty else f": {plain(parameter.annotation)}"
        equals = " = " if hint else "="
        default = "" if parameter.default is parameter.empty else f"{equals}{parameter.default!r}".replace("'", '"')
        arguments.append(f"{parameter.name}{hint}{default}")
    result = "" if taken.return_annotation in (None, taken.empty) else f" -> {plain(taken.return_annotation)}"
    return f"fastppo.{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){result}"


def plain(annotation: object) -> str:
    """As it is written in the source, whether it was evaluated or not."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(torch|typing|collections\.abc|fastppo(\.\w+)*|dist)\.(?=[A-Z])", "", text.strip("'\""))
    return text.replace("torch.distributed.distributed_c10d.", "").replace("NoneType", "None").replace("'", '"')


if __name__ == "__main__":
    sys.stdout.write(page())
