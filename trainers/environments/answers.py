"""Answers to maths problems: found in a text, and compared. What a model wrote is parsed, never evaluated."""

import ast
import operator
import re
import threading
from fractions import Fraction
from typing import Any

from trainers.environments.guards import MATHS_NAMES, TooSlow, is_plain_maths, time_limit

MAX_LENGTH = 300  # characters of an answer that is compared; a longer one is wrong
MAX_EXPRESSION = 100  # characters of an expression that is handed to sympy
MAX_DIGITS = 40
MAX_POWER = 100  # of an exponent, and of the product of exponents over each other
SYMPY_SECONDS = 1.0

INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
DECIMAL = rf"(?:{INTEGER}(?:\.\d+)?|\.\d+)"
FRACTION = r"(?:\\frac\{\s*[+-]?\d+\s*\}\{\s*[+-]?\d+\s*\}|\\frac\d\d|\d+\s*/\s*\d+)"
UNIT = r"[A-Za-z]{2,}\.?(?:\^\{?\d\}?)?(?:/[A-Za-z]+)?"
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)(?:\s+(?=\d)|\s*(?=\\)))?(?P<fraction>{FRACTION})(?P<unit>.*)"
    rf"|(?P<minus>[+-]?)\s*(?P<decimal>{DECIMAL})(?:[eE](?P<exponent>[+-]?\d{{1,2}})(?!\d))?(?P<rest>.*)",
    re.ASCII | re.DOTALL,
)
LAST_NUMBER = re.compile(
    rf"(?:(?<![\w)}}\].])[+-]\$?)?(?:\\[dt]?frac\{{\s*-?\d+\s*\}}\{{\s*-?\d+\s*\}}|{DECIMAL}(?:/\d+)?)(?:\s?\\?%)?",
    re.ASCII,
)
# Words after a number that are no unit: they change its value, or begin an expression.
CHANGING = """
hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens half halves third
thirds fourth fourths fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths quarter quarters
squared cubed factorial choose mod and or to plus minus times over
"""
NO_UNITS = MATHS_NAMES | set(CHANGING.split())
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def marked(text: str) -> str | None:
    """The answer that the text marks as its final one: last \\boxed{...}, else last ####, else last <answer>."""
    boxed = _last_box(text)
    if boxed is not None:
        return boxed
    _, hashes, after = text.rpartition("####")
    if hashes and after.strip():
        return after.strip().splitlines()[0].strip()
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def written(text: str) -> str | None:
    """The final answer of a response: the marked one, else the last number; None where there is neither."""
    answer = marked(text)
    if answer is not None:
        return answer
    numbers = LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def equal(answer: str | None, reference: str) -> bool:
    """Whether two answers are the same, as trainers/environments/math.py says."""
    if answer is None or len(answer) > MAX_LENGTH:
        return False
    left, right = plain(answer), plain(reference)
    a, b = number(left), number(right)
    if a and b:
        (x, percent), (y, other) = a, b
        return x == y or (percent != other and (x / 100 if percent else x) == (y / 100 if other else y))
    if not left or not right:
        return False
    return _same_text(left, right) or _same_expression(left, right)


def plain(text: str) -> str:
    """The answer without the commands of LaTeX that only change its looks, without `x =` before it, a stop after it."""
    text = text.strip().replace("\\$", "$").strip("$").strip().removesuffix(".").strip("$")
    text = re.sub(r"\\[()\[\]]|\\left(?![a-z])|\\right(?![a-z])|\$", "", text)
    text = re.sub(r"\\[!,;: ]|~|\{,\}", lambda m: "," if m[0] == "{,}" else "" if m[0] in ("\\!", "\\,") else " ", text)
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text).replace("\\%", "%").replace("−", "-")
    text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°|\\degree", " degrees", text)
    text = re.sub(r"\s+\^", "^", text)
    return re.sub(r"^\s*[A-Za-z]\s*=(?!=)", "", text).strip().removesuffix(".").strip()


def number(text: str) -> tuple[Fraction, bool] | None:
    """The exact value and whether it is a percentage; None if the text is not one number."""
    match = NUMBER.fullmatch(text)
    if match is None or sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    unit = (match["unit"] if match["fraction"] else match["rest"]).strip()
    percent = unit in ("%", "percent", "per cent")
    if not percent and not _is_unit(unit):
        return None
    if match["fraction"]:
        over, under = _two_integers(match["fraction"])
        if under == 0:
            return None
        value, sign = Fraction(int(match["whole"] or 0)) + Fraction(over, under), match["sign"]
    else:
        value, sign = Fraction(match["decimal"].replace(",", "")), match["minus"]
        value *= Fraction(10) ** int(match["exponent"] or 0)
    return (-value if sign == "-" else value), percent


def _two_integers(fraction: str) -> tuple[int, int]:
    if re.fullmatch(r"\\frac\d\d", fraction):
        return int(fraction[-2]), int(fraction[-1])
    over, under = re.findall(r"[+-]?\d+", fraction)
    return int(over), int(under)


def _is_unit(text: str) -> bool:
    words = text.split()
    return len(words) <= 4 and all(
        word == "m/s" or (re.fullmatch(UNIT, word, re.ASCII) and re.match("[A-Za-z]+", word)[0].lower() not in NO_UNITS)
        for word in words
    )


def _last_box(text: str) -> str | None:
    """One pass, whatever the nesting; a box that is never closed is none."""
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for token in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, re.DOTALL):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
        elif token[0].endswith("{") and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else None)
    return text[slice(*last)].strip() if last else None


def _same_text(left: str, right: str) -> bool:
    a, b = (re.sub(r"\s+", "", text) for text in (left, right))
    if a == b:
        return True
    words = r"\(?[A-Za-z]+\)?"  # words and the letters of a choice; elsewhere x and X are different variables
    return all(re.fullmatch(words, text) for text in (a, b)) and a.strip("()").lower() == b.strip("()").lower()


def _same_expression(left: str, right: str) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    import sympy

    try:
        with time_limit(SYMPY_SECONDS):
            return bool(sympy.simplify(expression(left) - expression(right)) == 0)
    except (Exception, TooSlow):  # no expression, or one that is too much for sympy
        return False


def expression(text: str) -> Any:
    """The text as a sympy expression.

    Raises:
        ValueError: it is not one, or not a small and plain one.
    """
    text = _without_latex(text)
    if len(text) > MAX_EXPRESSION or not is_plain_maths(text):
        raise ValueError(f"not plain maths: {text[:MAX_EXPRESSION]!r}")
    tokens = re.findall(r"\d+\.?\d*|\.\d+|[A-Za-z]+|\*\*|[-+*/()]", text)
    joined = []
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else "+"
        ends = before == ")" or before[-1].isalnum() or before[-1] == "."
        starts = token == "(" or token[0].isalnum() or token[0] == "."
        called = token == "(" and before in MATHS_NAMES - {"pi"}
        token = f"({Fraction(token)})" if "." in token else token  # exactly
        joined.append("*" + token if ends and starts and not called else token)
    if "".join(tokens) != re.sub(r"\s", "", text):
        raise ValueError(f"not an expression: {text!r}")
    return _build(ast.parse("".join(joined), mode="eval").body)


def _without_latex(text: str) -> str:
    for _ in range(10):  # from the inside out
        before = text
        text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\^\s*\{([^{}]*)\}", r"**(\1)", text)
        if text == before:
            break
    text = re.sub(r"\\(?:cdot|times)(?![a-z])", "*", text)
    text = re.sub(r"\\(pi|sin|cos|tan|exp|ln|log|sqrt)(?![a-z])", r" \1 ", text)
    return text.replace("^", "**")


def _build(node: ast.AST, powers: int = 1) -> Any:
    """`powers` is the product of the exponents that the node will be raised to."""
    import sympy

    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name):
        if node.id == "pi":
            return sympy.pi
        if len(node.id) == 1:
            return sympy.Symbol(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _build(node.operand, powers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        power = _build(node.right)
        if power.is_number:
            if not power.is_Rational or powers * max(abs(power.p), power.q) > MAX_POWER:
                raise ValueError("a power that is too large")
            powers *= max(abs(power.p), power.q)
        return _build(node.left, powers) ** power
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_build(node.left, powers), _build(node.right, powers))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and not node.keywords:
        name = {"ln": "log"}.get(node.func.id, node.func.id)
        if name in MATHS_NAMES - {"pi", "Integral"}:
            return getattr(sympy, name)(_build(node.args[0], powers))
    raise ValueError(f"not an expression: {ast.dump(node)[:60]}")
